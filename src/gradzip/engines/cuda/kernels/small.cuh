// For small messages, where a warp per block would leave most of the GPU idle: a group of 256 threads codes one block, in
// one launch. All of its warps make the segment's table, map and measure; then one pushes the lanes while the others wait
// for the block's place and write planes. What decides bytes is shared with the kernels for large messages.

constexpr u32 kSmallThreads = 256;

// A group's block.
DEVICE u32 take_ticket(const Args& a, u32* room) {
    if (threadIdx.x == 0) *room = atomicAdd(pointer<u32>(a.ticket), 1u) - a.served;
    __syncthreads();
    return uniform(*room);
}
// Of a decoder: who ends last tells the host what went wrong, which is also that this launch is done.
DEVICE void end_ticket(const Args& a) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(pointer<u32>(a.ticket) + 1, 1u) - a.served == gridDim.x - 1) tell_status(a);
    }
}

// The codes of a block's segment; the segment's first block stores the table.
template <class F, int CODING, int FLOOR, bool KEEP>
DEVICE void small_codes(const Args& a, const Turn& turn, TableRoom& room, u32* codes) {
    u64 segment = turn.block / kSegmentBlocks;
    choose_lengths<F, CODING, FLOOR, KEEP>(a, *turn.tensor, segment, room);
    Codes c = canonical(room);
    if (!c.complete && threadIdx.x == 0) atomicOr(pointer<u32>(a.status), (u32)kBadTable);
    write_codes(c, codes);
    if (turn.block % kSegmentBlocks == 0) store_table<CODING>(a, *turn.tensor, segment, room);
    __syncthreads();
}

DEVICE void small_block_table(const u32* codes, u32 base, u32* table) {
    u32 e = threadIdx.x, entry = codes[symbol_of(e, base)];
    if (entry == 0) entry = codes[256] | kEscapes;
    table[e] = entry | flags_of(e);
    __syncthreads();
}

// Behind an odd number of blocks the index is padded.
DEVICE void pad_index(const Args& a, const Turn& turn) {
    u64 blocks = blocks_of(turn.tensor->numel);
    if (threadIdx.x == 0 && blocks % 2 && turn.block == blocks - 1)
        pointer<u16>(turn.tensor->body + index_offset(turn.tensor->numel, a.book))[blocks] = 0;
}

// Sums over a block's values, formed by all threads.
struct SmallSums {
    u32 column[32];  // by lane: bits of codes, and << 16 zeros (fixed) or bits of lane parts
    u32 zeros[32];   // values with exponent 0 in every 128
    u32 bits, varied, loose;  // ors: of all values, of their complements, of those with exponent 0
    u32 fields, exact, differs, widest;
    u32 ticket;
    u64 place;
};

DEVICE void clear_sums(SmallSums& sums) {
    if (threadIdx.x < 32) sums.column[threadIdx.x] = sums.zeros[threadIdx.x] = 0;
    if (threadIdx.x == 0) sums.bits = sums.varied = sums.loose = sums.fields = sums.exact = sums.differs = 0;
}

// --- Coding 0 ------------------------------------------------------------------------------------------------------

constexpr u32 kSmallRefill = 4096;  // bytes of refill that find room; a block with more is written by one warp

template <class F, class S, int ROUNDING>
DEVICE void small_gather(const Args& a, const typename F::Bits* x, int n, typename S::Bits* values) {
    constexpr int kHalf = 8 * (F::kItem - S::kItem);
    bool aligned = n == kBlock && can_load_four<F>(x);
    if (aligned) {
        Four four[4];
        for (u32 k = 0; k < 4; k++) four[k] = load_four<F>(x, 4 * (threadIdx.x + kSmallThreads * k), true);
        for (u32 k = 0; k < 4; k++) {
            for (int c = 0; c < 4; c++) four[k].v[c] = map_fixed<F, ROUNDING != kAsIs>(four[k].v[c], a) >> kHalf;
            store_four<S>(values, 4 * (threadIdx.x + kSmallThreads * k), four[k], true);
        }
    } else {
        for (u32 i = threadIdx.x; i < (u32)n; i += kSmallThreads)
            values[i] = (typename S::Bits)(map_fixed<F, ROUNDING != kAsIs>(x[i], a) >> kHalf);
    }
    __syncthreads();
}

// The form of a block from the sums of its values; each warp finds it for itself.
template <class S>
DEVICE FixedForm small_form(const SmallSums& sums, const typename S::Bits* values, int n, u32 base, u32 raw) {
    u32 first = values[0], both = sums.column[lane_id()];
    bool single = exponent_of<S>(sums.bits ^ first) == 0 && exponent_of<S>(~sums.varied ^ first) == 0;
    return form_of<S>(sums.bits, single, single ? uniform(exponent_of<S>(first)) : base, sums.loose == 0, both, n, raw);
}

template <class S>
DEVICE void small_measure(const typename S::Bits* values, int n, const u32* table, SmallSums& sums) {
    u32 cost[4] = {0, 0, 0, 0}, bits = 0, varied = 0, loose = 0;
    for (u32 i = 4 * threadIdx.x; i < (u32)n; i += 4 * kSmallThreads) {
        u32 zeros = 0;
        for (u32 k = 0; k < 4 && i + k < (u32)n; k++) {
            u32 v = values[i + k], e = exponent_of<S>(v);
            cost[k] += (u16)table[e];
            bits |= v;
            varied |= ~v;
            loose |= e ? 0 : v;
            zeros += e == 0;
        }
        if (zeros) atomicAdd(&sums.zeros[i / 128], zeros);
    }
    __syncwarp();
    for (u32 k = 0; k < 4; k++) {
        u32 both = cost_of(cost[k]) | zeros_of(cost[k]) << 16;
        both += __shfl_xor_sync(kAll, both, 8);
        both += __shfl_xor_sync(kAll, both, 16);
        if (lane_id() < 8) atomicAdd(&sums.column[4 * lane_id() + k], both);
    }
    bits = or_of(bits), varied = or_of(varied), loose = or_of(loose);
    if (lane_id() == 0) {
        atomicOr(&sums.bits, bits);
        atomicOr(&sums.varied, varied);
        atomicOr(&sums.loose, loose);
    }
    __syncthreads();
}

// The planes of a block, by all warps but the first.
template <class S>
DEVICE void small_planes(const typename S::Bits* values, u8* planes, int n, const FixedForm& form, const u32* zeros) {
    bool bytes = form.fields == (u32)kBlock && form.rest == 0 && (S::kField == 24 || S::kField == 8);
    if (!bytes) {
        for (u32 part = warp_id() - 1; form.whole && 128 * part < (u32)n; part += kSmallThreads / 32 - 1) {
            u32 gaps = sum(form.pruned && lane_id() < part ? zeros[lane_id()] : 0);
            write_plane_parts<S>(values, planes, 128 * part, (u32)n, form, 128 * part - gaps);
        }
        return;
    }
    for (u32 i = threadIdx.x - 32; i < (u32)kBlock / 4; i += kSmallThreads - 32) {
        Four f = read_four<S>(values, 4 * i);
        for (int k = 0; k < 4; k++) f.v[k] = field_of<S>(f.v[k]) >> (S::kField - 8 * form.whole);
        for (u32 j = 0; j < form.whole; j++)
            ((u32*)planes)[1024 * j + i] = (f.v[0] >> 8 * j & 255) | (f.v[1] >> 8 * j & 255) << 8 |
                                           (f.v[2] >> 8 * j & 255) << 16 | (f.v[3] >> 8 * j & 255) << 24;
    }
}

template <class F, class S, int ROUNDING>
DEVICE void small_fixed(const Args& a) {
    typedef typename S::Bits Stored;
    // Tables are done with before values come.
    __shared__ __align__(16) u8 early_then_values[sizeof(TableRoom) > 4 * kBlock ? sizeof(TableRoom) : 4 * kBlock];
    __shared__ u32 codes[257], table[256];
    __shared__ __align__(16) u8 refill[kSmallRefill];
    __shared__ SmallSums sums;
    TableRoom& room = *(TableRoom*)early_then_values;
    Stored* values = (Stored*)early_then_values;
    clear_sums(sums);
    Turn turn = turn_of(a, take_ticket(a, &sums.ticket));
    u32 warp = warp_id();
    const typename F::Bits* x = pointer<const typename F::Bits>(turn.tensor->values) + turn.start;
    if (warp == 0) prefetch_stretch(x, (u32)F::kItem * (u32)turn.n);
    pad_index(a, turn);
    small_codes<F, kFixed, kNoFloor, ROUNDING != kAsIs>(a, turn, room, codes);
    small_gather<F, S, ROUNDING>(a, x, turn.n, values);
    u32 base = base_of<S>(values, turn.n);
    small_block_table(codes, base, table);
    small_measure<S>(values, turn.n, table, sums);
    FixedForm form = small_form<S>(sums, values, turn.n, base, (u32)(turn.n * F::kItem + 3) / 4);
    if (warp == 0) {
        __threadfence();  // the status comes first
        announce(a, turn, form.words);
    }
    if (form.kind != kDense || form.refill > kSmallRefill) {
        if (warp == 0) write_fixed<F, S>(a, turn, values, form, table, refill);
        return;
    }
    if (form.single) table[threadIdx.x] = flags_of(threadIdx.x);
    Lanes lanes(refill, nullptr);
    __syncthreads();
    bool escapes = false;
    u32 refill_at = 68 + form.whole * form.fields;
    u8* block = nullptr;
    if (warp == 0) {
        escapes = form.rest ? push_fixed_rows<S, true, true>(lanes, values, table, turn.n, form, false)
                            : push_fixed_rows<S, false, true>(lanes, values, table, turn.n, form, false);
    } else {
        u64 place = await_place(a, turn, form.words);
        if (warp == 1) block = settle(a, turn, form.kind, form.words, place);
        else block = pointer<u8>(turn.tensor->body) + blocks_offset(turn.tensor->numel, a.book) + 4 * place;
        if (threadIdx.x == 32) sums.place = (u64)block;
        small_planes<S>(values, block + 68, turn.n, form, sums.zeros);
    }
    __syncthreads();
    block = pointer<u8>(sums.place);
    copy_words(block + refill_at, refill, form.refill, threadIdx.x, kSmallThreads);
    if (warp == 0)
        finish_dense(block, {form.whole, form.rest, form.pruned, escapes, form.single, form.base, form.fields}, lanes);
}

// --- Codings 1 and 2 -----------------------------------------------------------------------------------------------

struct SmallLanes {
    u32 q[kBlock];
    u8 width[kBlock];
};

// Four rows of mapped values, with their entries in the block's table.
struct SmallRows {
    u32 q[4], entry[4];
    int width[4];
};

DEVICE SmallRows read_small_rows(const SmallLanes& values, const u32* table, int row, int n) {
    SmallRows rows;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        int i = row + 32 * k + (int)lane_id();
        bool here = i < n;
        rows.q[k] = here ? values.q[i] : 0;
        rows.width[k] = here ? values.width[i] : 0;
        rows.entry[k] = here ? table[(rows.q[k] >> 23) & 255] : 0;
    }
    __syncwarp();
    return rows;
}

// Pushes all rows, the last one first; returns whether there were escapes. Rows are read while those before are pushed.
template <int CODING>
DEVICE bool push_small_rows(Lanes& lanes, const SmallLanes& values, int n, const u32* table) {
    u32 seen = 0;
    int last = (n + 127) / 128 * 128 - 128;
    SmallRows next = read_small_rows(values, table, last, n);
#pragma unroll 1
    for (int row = last; row >= 0; row -= 128) {
        SmallRows now = next;
        next = read_small_rows(values, table, max_int(row - 128, 0), n);
        u32 flags = now.entry[0] | now.entry[1] | now.entry[2] | now.entry[3];
        int widest = max_int(max_int(now.width[0], now.width[1]), max_int(now.width[2], now.width[3]));
        seen |= flags;
        bool unusual = any((flags & kUnusual) != 0), chunked = any(widest > 8);
#pragma unroll
        for (int k = 3; k >= 0; k--)
            push_lane_row<CODING>(lanes, now.q[k], now.width[k], now.entry[k], unusual, chunked);
    }
    return any((seen & kEscapes) != 0);
}

// Maps all values and sums up what decides the block's form.
template <int CODING, int FLOOR>
DEVICE void small_map(const Source<Float32, FLOOR>& s, int n, const u32* table, u32 first, SmallLanes& values, SmallSums& sums) {
    u32 code_bits = 0, part_bits = 0, fields = 0;
    bool exact = false, differs = false;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < (u32)n; i += kSmallThreads) {
        Mapped q = map_row<CODING>(s, load_row(s, i));
        values.q[i] = quiet(q.bits);
        values.width[i] = (u8)q.width;
        code_bits += cost_of((u16)table[q.e]) + (CODING == kPaper && q.e ? 2 : 0);
        part_bits += (u32)q.width;
        fields += q.e != 0;
        exact |= q.width == 24;
        differs |= q.e != first;
    }
    __syncwarp();
    atomicAdd(&sums.column[lane_id()], code_bits | part_bits << 16);
    fields = sum(fields);
    exact = any(exact), differs = any(differs);
    if (lane_id() == 0) {
        atomicAdd(&sums.fields, fields);
        atomicOr(&sums.exact, (u32)exact);
        atomicOr(&sums.differs, (u32)differs);
    }
    __syncthreads();
}

template <int CODING, int FLOOR>
DEVICE void small_lanes(const Args& a) {
    __shared__ __align__(16) u8 early_then_values[sizeof(SmallLanes)];
    static_assert(sizeof(SmallLanes) >= sizeof(TableRoom), "tables are done with before values come");
    __shared__ u32 codes[257], table[256];
    __shared__ __align__(16) u8 refill[4 * kBlock];
    __shared__ SmallSums sums;
    TableRoom& room = *(TableRoom*)early_then_values;
    SmallLanes& values = *(SmallLanes*)early_then_values;
    clear_sums(sums);
    Turn turn = turn_of(a, take_ticket(a, &sums.ticket));
    u32 warp = warp_id(), n = (u32)turn.n;
    Source<Float32, FLOOR> source(a, *turn.tensor, turn.start);
    if (warp == 0) prefetch_stretch(source.x, 4 * n);
    if (warp == 1 && FLOOR >= kThetaFloor) prefetch_stretch(source.theta, 4 * n);
    if (warp == 2 && FLOOR == kSecondFloor) prefetch_stretch(source.second, 4 * n);
    pad_index(a, turn);
    small_codes<Float32, CODING, FLOOR, false>(a, turn, room, codes);
    u32 e[8], nonzero;
    u32 base = sample_block<Float32, CODING, FLOOR, false>(a, source, turn.n, e, &nonzero);
    u32 first = __shfl_sync(kAll, e[0], 0);
    small_block_table(codes, base, table);
    small_map<CODING>(source, turn.n, table, first, values, sums);

    bool single = !sums.differs;
    u32 both = sums.column[lane_id()], code_bits = both & 0xffff, part_bits = both >> 16;
    // Levels, in paper mode, are counted with the codes; in a block of one exponent they remain.
    if (single) code_bits = CODING == kPaper && first ? 2 * (n / 32 + (lane_id() < n % 32)) : 0;
    u32 refill_bytes = sum((code_bits + part_bits) / 8), words = (68 + refill_bytes + 3) / 4;
    if (sums.fields == 0 || (CODING == kNear && 2 * sums.fields <= n)) {  // sparse, or a candidate: one warp does it
        u8* slot = pointer<u8>(a.slots) + (u64)turn.turn * kSlotBytes;
        if (warp == 0) {
            LaneForm form = code_lanes<CODING>(a, source, turn.n, codes, table, refill, slot);
            __threadfence();
            __syncwarp();
            announce(a, turn, form.words);
            deliver<CODING>(a, turn, source, form, slot);
        }
        return;
    }
    u32 kind = words < n ? kDense : kRaw;
    words = words < n ? words : n;
    if (warp == 0) {
        __threadfence();  // the status comes first
        announce(a, turn, words);
    }
    if (single) table[threadIdx.x] = flags_of(threadIdx.x);
    Lanes lanes(refill, nullptr);
    __syncthreads();
    bool escapes = false;
    if (warp == 0 && kind == kDense) escapes = push_small_rows<CODING>(lanes, values, turn.n, table);
    if (warp == 1) {
        u8* block = settle(a, turn, kind, words, await_place(a, turn, words));
        if (lane_id() == 0) sums.place = (u64)block;
    }
    __syncthreads();
    u8* block = pointer<u8>(sums.place);
    if (kind == kRaw) {
        for (u32 i = threadIdx.x; i < n; i += kSmallThreads) ((u32*)block)[i] = values.q[i];
    } else {
        copy_words(block + 68, refill, refill_bytes, threadIdx.x, kSmallThreads);
        if (warp == 0) finish_dense(block, {0, 0, 1, escapes, single, single ? first : base, sums.fields}, lanes);
    }
}
