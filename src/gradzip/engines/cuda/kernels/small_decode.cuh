// The decoder for small messages: a group of 256 threads decodes BLOCKS blocks, with two warps for each. One pops the rows, a
// chain of steps that wait for each other, and does nothing else; floors are made before it starts. The other follows it and
// puts values: planes, sums and memory take their time there.

// What the rows of a block of coding 0 gave.
struct FixedCells {
    u8 exponent[kBlock];
    u8 rest[kBlock];  // further bits of the fields
};
// Of codings 1 and 2: floors, which become values.
struct LaneCells {
    u32 cell[kBlock];
};

template <int CODING>
struct CellsOf {
    typedef LaneCells Type;
};
template <>
struct CellsOf<kFixed> {
    typedef FixedCells Type;
};

// --- From one warp to the other ------------------------------------------------------------------------------------

constexpr u32 kStop = kAll;  // there will be no more values
constexpr u32 kStretch = 512;  // values that are handed over at once

struct Handover {
    u32 ready;   // so many values are there
    u32 floors;  // near mode: and floors for so many
    u32 kind;   // dense, raw, or sparse: zeros
    const u32* block;
    DenseHead head;
};

// `count` is one of a Handover's.
DEVICE void hand_over(u32& count, u32 to) {
    __syncwarp();
    if (lane_id() == 0) {
        __threadfence_block();
        *(volatile u32*)&count = to;
    }
}

// For a block that the other warp has nothing to do with.
DEVICE void stop_unless_begun(Handover& over) {
    __syncwarp();
    if (lane_id() == 0 && over.ready == 0) *(volatile u32*)&over.ready = kStop;
}

// Until there are more than `seen`.
DEVICE u32 await_more(const u32& count, u32 seen) {
    for (;;) {
        u32 there = uniform(*(const volatile u32*)&count);
        if (there > seen) {
            __threadfence_block();
            __syncwarp();
            return there;
        }
        let_others_run();
    }
}

// --- Popping -------------------------------------------------------------------------------------------------------

// Bytes of shared memory that a lane fills one after the other. The address is what changes, so that it stays in a register.
struct ByteColumn {
    u8* room;
    u32 at;

    __device__ __forceinline__ ByteColumn(u8* first) : room(first) {
#if defined(__CUDA_ARCH__)
        at = (u32)__cvta_generic_to_shared(first);
#else
        at = 0;
#endif
    }
    __device__ __forceinline__ void put(u32 offset, u32 byte) const {
#if defined(__CUDA_ARCH__)
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(at + offset), "r"(byte));
#else
        room[at + offset] = (u8)byte;
#endif
    }
};

// Returns the number of fields.
template <class F, bool REST>
DEVICE u32 stage_fixed(Stream& s, const u32* table, const DenseHead& h, int n, FixedCells& cells, Handover& over, u32& seen) {
    u32 zeros = 0, lane = lane_id();
    ByteColumn exponents(cells.exponent + lane), rests(cells.rest + lane);
    auto pop_row = [&](u32 offset, bool here) {
        u32 e = (s.template pop_exponent<F, true>(table, here, seen) >> 23) & 255;
        exponents.put(offset, e);
        zeros += here && e == 0;
        if (REST) {
            u32 count = here && (!h.pruned || e != 0) ? h.rest : 0;
            rests.put(offset, s.state & ((1u << count) - 1));
            s.pop(count);
        }
    };
    int row = 0;
#pragma unroll 1
    for (; row + 128 <= n; row += 128) {
        s.advance();
#pragma unroll
        for (u32 k = 0; k < 4; k++) pop_row(32 * k, true);
        exponents.at += 128, rests.at += 128;
        if ((row + 128) % (int)kStretch == 0) hand_over(over.ready, (u32)row + 128);
    }
    s.advance();
#pragma unroll 1
    for (; row < n; row += 32) {
        pop_row(0, row + (int)lane < n);
        exponents.at += 32, rests.at += 32;
    }
    hand_over(over.ready, (u32)n);
    return h.pruned ? (u32)n - sum(zeros) : (u32)n;
}

// A row in near mode, all pops of a lane at once: how many bits it has and how many each pop takes says which of them need
// a byte, so that votes and bytes need not wait for each other.
DEVICE u32 near_row(Stream& s, const u32* table, bool here, int floor, u32& fields, u32& seen) {
    u32 entry = here ? table[s.state & 255] : 0, missing = (u32)__clz((int)s.state) - 16;
    if (any((entry & kEscaped) != 0)) return lane_row<kNear, true>(s, table, here, floor, fields, seen);
    seen |= entry;
    int e = (int)((entry >> 23) & 255), width = e ? 1 + kept_bits(e, floor) : 0;
    u32 length = entry & 15, before = 0, count[4], bytes[4];
    int at = s.at;
    fields += width > 0;
    for (int k = 0; k < 4; k++) count[k] = k ? (u32)max_int(0, min_int(width - 8 * (k - 1), 8)) : length;
    bool few[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 popped = length + (u32)min_int(width, 8 * k), refills = (popped + missing) >> 3;
        few[k] = refills > before;
        before = refills;
        u32 votes = __ballot_sync(kAll, few[k]);
        bytes[k] = few[k] ? s.window[(u32)(at - __popc(votes & s.upper)) % kWindow] : 0;
        at -= __popc(votes);
    }
    s.at = at;
    u32 field = 0, x = s.state;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k) field |= (x & ((1u << count[k]) - 1)) << 8 * (k - 1);
        x >>= count[k];
        if (few[k]) x = x << 8 | bytes[k];
    }
    s.state = x;
    field <<= (24 - width) & 31;
    return (entry & 0x7f800000u) | (field & 0x7fffffu) | ((field << 8) & 0x80000000u);
}

// Returns how many values are not 0.
template <int CODING>
DEVICE u32 stage_lanes(Stream& s, const u32* table, int n, LaneCells& cells, Handover& over, u32& seen) {
    u32 fields = 0, lane = lane_id();
#pragma unroll 1
    for (int row = 0; row < n; row += 64) {
        if (CODING == kNear && row % (int)kStretch == 0) await_more(over.floors, (u32)row);
        int floor[2];
        for (u32 k = 0; k < 2; k++) floor[k] = (int)cells.cell[(u32)row + 32 * k + lane];
        s.advance();
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            u32 i = (u32)row + 32 * k + lane;
            bool here = i < (u32)n;
            cells.cell[i] = CODING == kNear ? near_row(s, table, here, floor[k], fields, seen)
                                            : lane_row<CODING, true>(s, table, here, floor[k], fields, seen);
        }
        if ((row + 64) % (int)kStretch == 0) hand_over(over.ready, (u32)min_int(row + 64, n));
    }
    hand_over(over.ready, (u32)n);
    return sum(fields);
}

// Rows are handed over to the other warp.
template <class F, int CODING>
struct StagedRows {
    typename CellsOf<CODING>::Type& cells;
    Handover& over;
    int n;

    __device__ __forceinline__ void tell(u32 kind, const u32* block, const DenseHead& h) const {
        if (lane_id() == 0) over.kind = kind, over.block = block, over.head = h;
    }
    __device__ __forceinline__ u32 dense(Stream& s, const u32* table, const DenseHead& h, u32& seen) const {
        tell(kDense, s.block, h);
        if constexpr (CODING == kFixed)
            return h.rest ? stage_fixed<F, true>(s, table, h, n, cells, over, seen)
                          : stage_fixed<F, false>(s, table, h, n, cells, over, seen);
        else
            return stage_lanes<CODING>(s, table, n, cells, over, seen);
    }
    __device__ __forceinline__ void raw(const u32* block) const {
        tell(kRaw, block, {});
        hand_over(over.ready, (u32)n);
    }
    __device__ __forceinline__ void zeros() const {
        tell(kSparse, nullptr, {});
        hand_over(over.ready, (u32)n);
    }
};

// --- Putting -------------------------------------------------------------------------------------------------------

// A stretch of values; `four_at` gives four neighbours. All that is read is under way before the first is written.
template <class F, bool ADD, class Get>
DEVICE void put_stretch(const Sink<F, ADD>& sink, u32 first, u32 n, const Get& four_at) {
    u32 own = first + 4 * lane_id();
    if (first + kStretch <= n) {
        bool aligned = sink.aligned();
        Four four[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) four[k] = sink.added(own + 128 * k, four_at(own + 128 * k), aligned);
#pragma unroll
        for (u32 k = 0; k < 4; k++) store_four<F>(sink.out, own + 128 * k, four[k], aligned);
        return;
    }
    for (u32 i = own; i < n; i += 128) {
        Four four = four_at(i);
        for (u32 k = 0; k < 4 && i + k < n; k++) sink.put(i + k, four.v[k]);
    }
    __syncwarp();
}

// Of a dense block of coding 0 whose values all have fields of whole bytes.
template <class F>
DEVICE Four plain_four(const u32* planes, u32 whole, const FixedCells& cells, u32 i) {
    u32 e = ((const u32*)cells.exponent)[i / 4], plane[3];
#pragma unroll
    for (u32 j = 0; j < 3; j++) plane[j] = j < whole ? planes[1024 * j + i / 4] : 0;
    Four four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 field = (plane[0] >> 8 * k & 255) | (plane[1] >> 8 * k & 255) << 8 | (plane[2] >> 8 * k & 255) << 16;
        four.v[k] = join<F>(e >> 8 * k & 255, field << (F::kField - 8 * whole));
    }
    return four;
}

// Of any dense block of coding 0: a stretch that is full, with `before` fields before it. Values without a field left no gap in
// the planes, so that a lane's bytes lie together, anywhere. Returns the fields up to its end.
template <class F, bool ADD>
DEVICE u32 put_gapped(const DenseHead& h, const u32* block, const FixedCells& cells, const Sink<F, ADD>& sink, u32 first,
                      u32 before) {
    constexpr u32 kParts = 2;  // of 128 values, whose bytes are under way together
    u32 last = (68 + h.whole * h.fields - 1) / 4, down = (u32)F::kField - 8 * h.whole - h.rest;
    bool aligned = sink.aligned();
#pragma unroll 1
    for (u32 begin = first + 4 * lane_id(); begin < first + kStretch; begin += 128 * kParts) {
        u32 e[kParts], bytes[kParts][3], low[kParts][3], high[kParts][3];
#pragma unroll
        for (u32 p = 0; p < kParts; p++) {
            e[p] = ((const u32*)cells.exponent)[begin / 4 + 32 * p];
            u32 own = 0;
            for (int k = 0; k < 4; k++) own += !h.pruned || (e[p] >> 8 * k & 255) != 0;
            u32 after = any(own != 4) ? running_sum(own) : 4 * lane_id() + 4;
#pragma unroll
            for (u32 j = 0; j < 3; j++) {
                bytes[p][j] = 68 + j * h.fields + before + after - own;
                u32 word = min_u32(bytes[p][j] / 4, last);  // what it counts has not been judged yet
                low[p][j] = j < h.whole ? block[word] : 0;
                high[p][j] = j < h.whole ? block[min_u32(word + 1, last)] : 0;
            }
            before += __shfl_sync(kAll, after, 31);
        }
#pragma unroll
        for (u32 p = 0; p < kParts; p++) {
            u32 i = begin + 128 * p, rests = h.rest ? ((const u32*)cells.rest)[i / 4] : 0, plane[3];
            for (u32 j = 0; j < 3; j++) plane[j] = __funnelshift_r(low[p][j], high[p][j], 8 * (bytes[p][j] & 3));
            Four four;
            u32 place = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 exponent = e[p] >> 8 * k & 255, kept = rests >> 8 * k & 255;
                if (!h.pruned || exponent) {
                    for (u32 j = 0; j < 3; j++) kept |= (plane[j] >> place & 255) << (h.rest + 8 * j);
                    place += 8;
                }
                four.v[k] = join<F>(exponent, kept << down);
            }
            store_four<F>(sink.out, i, sink.added(i, four, aligned), aligned);
        }
        __syncwarp();
    }
    return before;
}

// The same for the end of a block that is not full, row by row.
template <class F, bool ADD>
DEVICE void put_rows(const DenseHead& h, const u8* planes, const FixedCells& cells, const Sink<F, ADD>& sink, u32 first, u32 n,
                     u32 before) {
    u32 lower = lower_lanes();
    for (u32 row = first; row < n; row += 32) {
        u32 i = row + lane_id(), e = cells.exponent[i], kept = h.rest ? cells.rest[i] : 0;
        bool has_field = i < n && (!h.pruned || e != 0);
        u32 votes = __ballot_sync(kAll, has_field), place = before + (u32)__popc(votes & lower);
        if (has_field && place < h.fields)
            for (u32 j = 0; j < h.whole; j++) kept |= (u32)planes[j * h.fields + place] << (h.rest + 8 * j);
        if (i < n) sink.put(i, join<F>(e, kept << ((u32)F::kField - 8 * h.whole - h.rest)));
        before += (u32)__popc(votes);
    }
    __syncwarp();
}

// Floors from value `first` on, up to `end`, by as many threads.
template <int FLOOR>
DEVICE void stage_floors(const Source<Float32, FLOOR>& source, u32 first, u32 end, LaneCells& cells, u32 thread, u32 threads) {
    constexpr u32 kMore = 8;
    for (u32 i = first + thread; i < end; i += kMore * threads) {
        FloorInput in[kMore];
#pragma unroll
        for (u32 k = 0; k < kMore; k++) in[k] = i + k * threads < end ? load_floor(source, i + k * threads) : FloorInput{0, 0};
#pragma unroll
        for (u32 k = 0; k < kMore; k++)
            if (i + k * threads < end) cells.cell[i + k * threads] = (u32)make_floor(source, in[k]);
    }
}

constexpr u32 kFloorsAhead = 2 * kStretch;  // floors that are there before rows are popped

template <class F, int CODING, int FLOOR, bool ADD>
DEVICE void put_values(const Source<Float32, FLOOR>& source, Handover& over, typename CellsOf<CODING>::Type& cells,
                       const Sink<F, ADD>& sink, u32 n) {
    typedef typename F::Bits Bits;
    u32 fields = 0;
#pragma unroll 1
    for (u32 first = 0; first < n; first += kStretch) {
        if constexpr (CODING == kNear) {
            u32 from = first + kFloorsAhead, end = min_u32(from + kStretch, n);
            stage_floors(source, from, end, cells, lane_id(), 32);
            if (from < end) hand_over(over.floors, end);
        }
        if (await_more(over.ready, first) == kStop) return;
        u32 kind = over.kind;
        const u32* block = over.block;
        DenseHead h = over.head;
        if (kind == kSparse) {
            put_stretch(sink, first, n, [](u32) { return Four{{0, 0, 0, 0}}; });
        } else if (kind == kRaw) {
            const Bits* raw = (const Bits*)block;
            bool together = n == (u32)kBlock && can_load_four<F>(raw);
            put_stretch(sink, first, n, [=](u32 i) {
                if (together) return load_four<F>(raw, i, true);
                Four four = {{0, 0, 0, 0}};
                for (u32 k = 0; k < 4 && i + k < n; k++) four.v[k] = raw[i + k];
                return four;
            });
        } else if constexpr (CODING != kFixed) {
            put_stretch(sink, first, n, [&](u32 i) { return load_four<Float32>(cells.cell, i, true); });
        } else if (n == (u32)kBlock && h.fields == n && h.rest == 0) {
            put_stretch(sink, first, n, [&](u32 i) { return plain_four<F>(block + 17, h.whole, cells, i); });
        } else if (first + kStretch <= n) {
            fields = put_gapped(h, block, cells, sink, first, fields);
        } else {
            put_rows(h, (const u8*)block + 68, cells, sink, first, n, fields);
        }
    }
}

template <class F, int CODING, int FLOOR, bool ADD, int BLOCKS>
DEVICE void small_decode(const Args& a) {
    typedef typename CellsOf<CODING>::Type Cells;
    Cells* cells = (Cells*)dynamic_shared;
    __shared__ CodeRoom room;
    __shared__ Handover over[BLOCKS];
    __shared__ u32 lookup[256], tables[BLOCKS][256];
    __shared__ __align__(kWindow) u32 windows[BLOCKS][kWindow / 4];
    u32 group = blockIdx.x, warp = warp_id(), own = warp % BLOCKS;  // the warp's block
    const Tensor& t = a.tensor[tensor_of_group(a, group)];
    bool shared_book = t.lengths != 0;
    const u16* index = (const u16*)(pointer<const u8>(t.body) + index_offset(t.numel, shared_book));
    u64 first = (u64)(group - t.first_group) * BLOCKS, block = first + own, end = blocks_of(t.numel), start = block * kBlock;
    u32 here = end - first < BLOCKS ? (u32)(end - first) : BLOCKS;  // blocks of this group
    // All that is read from memory here is under way at once.
    if (CODING == kNear && warp < here) prefetch_floors<FLOOR>(a, t, start, values_in(t, start));
    u32 length = stored_length(t, first / kSegmentBlocks), before = 0, entry = own < here ? index[block] : 0, nearer = 0;
    BodyHead head = read_head(t);
    for (u64 b = threadIdx.x; b < first; b += kSmallThreads) before += index[b] & 0x3fff;
    for (u32 b = 0; b < here; b++) nearer += b < own ? index[first + b] & 0x3fff : 0;
    __syncwarp();
    u32 fault = judge_head(a, t, head);
    if (fault) {
        if (first == 0 && threadIdx.x == 0) atomicOr(pointer<u32>(a.status), fault);
        end_ticket(a);
        return;
    }
    room.length[threadIdx.x] = (u8)length;
    if (threadIdx.x < BLOCKS) over[threadIdx.x].ready = 0, over[threadIdx.x].floors = kFloorsAhead;
    if constexpr (CODING == kNear)
        for (u32 b = 0; b < here; b++) {
            u32 n = min_u32((u32)values_in(t, (first + b) * kBlock), kFloorsAhead);
            stage_floors(Source<Float32, FLOOR>(a, t, (first + b) * kBlock), 0, n, cells[b], threadIdx.x, kSmallThreads);
        }
    __syncthreads();
    Codes c = canonical(room);
    write_lookup(c, lookup);
    u64 at = group_sum(before, room.sums) + nearer;
    if (!c.complete) {
        fault = kBadTable;
    } else if (own < here && warp < BLOCKS) {
        StagedRows<F, CODING> rows = {cells[own], over[own], values_in(t, start)};
        u32* lists = pointer<u32>(a.slots) + (u64)(group * BLOCKS + own) * (kSlotBytes / 4);
        fault = decode_block<F, CODING, FLOOR, ADD>(a, t, block, uniform(entry), at, lookup, tables[own], (u8*)windows[own],
                                                    lists, rows);
        stop_unless_begun(over[own]);
    } else if (own < here && warp < 2 * BLOCKS) {
        put_values<F, CODING>(Source<Float32, FLOOR>(a, t, start), over[own], cells[own], Sink<F, ADD>(t, start),
                              (u32)values_in(t, start));
    }
    if (fault && lane_id() == 0) atomicOr(pointer<u32>(a.status), fault);
    end_ticket(a);
}
