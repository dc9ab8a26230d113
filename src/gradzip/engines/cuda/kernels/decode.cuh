// The decoder: one warp decodes one block. Payloads are not trusted: every read is held to the block it belongs to, and
// what contradicts docs/format.md is or-ed into a status word that the host reads at the end.

// `rows` says what becomes of the values, see DirectRows.
template <class F, int CODING, class Rows>
DEVICE u32 decode_dense(int n, const u32* block, u32 words, const u32* lookup, u32* table, u8* window, const Rows& rows) {
    if (words < 17) return kShortDense;
    u32 head = uniform(block[0]);
    DenseHead h = {head & 3, (head >> 2) & 7, (head >> 5) & 1, (head >> 6) & 1, (head >> 7) & 1, (head >> 8) & 255,
                   (head >> 16) & 0x3fff};
    u32 padding = head >> 30, end = 4 * words - padding, width = 8 * h.whole + h.rest, lowest = 68 + h.whole * h.fields;
    bool wrong = CODING == kFixed ? width > (u32)F::kField : width != 0 || !h.pruned;
    wrong |= (h.base >> F::kExponent) != 0 || h.fields > (u32)n || (h.single && h.escapes) || lowest > end;
    wrong |= padding && block[words - 1] >> (32 - 8 * padding);
    if (wrong) return kBadDenseHead;
    u32 state = ((const u16*)(block + 1))[lane_id()];
    if (any(state < 256)) return kBadLanes;
    make_lookup<F>(lookup, h.base, h.single, table);
    Stream s(block, window, (int)lowest, (int)end, state);
    u32 seen = 0, fields = rows.dense(s, table, h, seen);
    if (any(!s.sound() || (seen & kImpossible) || ((seen & kEscaped) && !h.escapes))) return kBadLanes;
    return fields != h.fields ? kBadFields : 0;
}

// --- Sparse blocks -------------------------------------------------------------------------------------------------

// The 32 bits from bit `at` on; words from `limit` on read as zero.
DEVICE u32 get_bits(const u32* block, u32 at, u32 limit) {
    u32 word = at >> 5, shift = at & 31;
    u32 low = word < limit ? block[word] : 0, high = word + 1 < limit ? block[word + 1] : 0;
    return __funnelshift_r(low, high, shift);
}

// The padding bits of a part that ends before bit `end`: up to the next whole byte.
DEVICE u32 padding_bits(const u32* block, u32 end, u32 limit) {
    return get_bits(block, end, limit) & ((1u << ((0u - end) & 7)) - 1);
}

// Lists the places of the ones among `bits` bits from bit `at` on, `most` of them at the most; returns their number.
DEVICE u32 list_ones(const u32* block, u32 at, u32 bits, u32 limit, u32* found, u32 most) {
    u32 before = 0;
    for (u32 first = 0; first < bits; first += 1024) {
        u32 here = first + 32 * lane_id();
        u32 word = here < bits ? get_bits(block, at + here, limit) : 0;
        if (here < bits && bits - here < 32) word &= (1u << (bits - here)) - 1;
        u32 own = (u32)__popc(word), after = running_sum(own);
        u32 rank = before + after - own;
        while (word) {
            u32 bit = (u32)__ffs((int)word) - 1;
            if (rank < most) found[rank] = here + bit;
            rank++;
            word &= word - 1;
        }
        __syncwarp();
        before += __shfl_sync(kAll, after, 31);
    }
    return before;
}

template <int FLOOR, bool ADD>
DEVICE u32 decode_sparse(const Args& a, const Tensor& t, u64 start, int n, const u32* block, u32 limit, u32* lists) {
    Sink<Float32, ADD> sink(t, start);
    Source<Float32, FLOOR> source(a, t, start);
    u32 m = block[0] & 0xffff, distances = block[0] >> 16;
    if (m == 0 || m > (u32)n) return kBadSparse;
    SparseLayout at(m, (u32)n, distances, 0);
    u32 high_bits = m + (((u32)n - 1) >> at.low);
    if (at.mantissas > 32 * limit) return kBadSparse;
    u32 wrong = padding_bits(block, 32 + m * (at.low + 1), limit) | padding_bits(block, at.highs + high_bits, limit) |
                padding_bits(block, at.lengths + m + distances, limit);
    u32 *highs = lists, *lengths = lists + kBlock;
    if (wrong || list_ones(block, at.highs, high_bits, limit, highs, m) != m ||
        list_ones(block, at.lengths, m + distances, limit, lengths, m) != m)
        return kBadSparse;
    __threadfence_block();
    __syncwarp();
    if (lengths[m - 1] != m + distances - 1) return kBadSparse;
    for (u32 i = lane_id(); i < (u32)n; i += 32) sink.put(i, 0);
    __syncwarp();
    u32 kept = 0;
    for (u32 first = 0; first < m; first += 32) {
        u32 i = first + lane_id();
        bool here = i < m, good = true;
        u32 p = 0, sign = 0, k = 0;
        int e = 0;
        if (here) {
            u32 mask = (2u << at.low) - 1;
            u32 field = get_bits(block, 32 + i * (at.low + 1), limit) & mask;
            p = (highs[i] - i) << at.low | field >> 1;
            sign = field & 1;
            good = p < (u32)n;
            if (i) {
                u32 before = get_bits(block, 32 + (i - 1) * (at.low + 1), limit) & mask;
                good = good && p > ((highs[i - 1] - (i - 1)) << at.low | before >> 1);
            }
            if (good) {
                int d = (int)(lengths[i] - (i ? lengths[i - 1] + 1 : 0));
                int f = floor_at(source, p);
                e = d + 127 + max_int(f, -128);
                good = e >= 1 && e <= 255;
                k = good ? (u32)kept_bits(e, f) : 0;
            }
        }
        if (any(here && !good)) return kBadSparse;
        u32 after = running_sum(k);
        if (here) {
            u32 bits = get_bits(block, at.mantissas + kept + after - k, limit) & ((1u << k) - 1);
            u32 value = sign << 31 | (u32)e << 23 | bits << (23 - k);
            sink.put(p, value);
        }
        kept += __shfl_sync(kAll, after, 31);
    }
    // What is left behind the mantissas is less than a word, and zero.
    u32 end = at.mantissas + kept;
    if ((end + 31) / 32 != limit || ((end & 31) && block[limit - 1] >> (end & 31))) return kBadSparse;
    return 0;
}

// --- The kernel ----------------------------------------------------------------------------------------------------

// A block whose entry in the index is given, and the words before it.
template <class F, int CODING, int FLOOR, bool ADD, class Rows>
DEVICE u32 decode_block(const Args& a, const Tensor& t, u64 block, u32 entry, u64 at, const u32* lookup, u32* table,
                        u8* window, u32* lists, const Rows& rows) {
    u32 kind = entry >> 14, words = entry & 0x3fff;
    u64 from = blocks_offset(t.numel, t.lengths != 0) + 4 * at, end = from + 4 * (u64)words, start = block * kBlock;
    int n = values_in(t, start);
    if (end > t.body_bytes) return kShortBody;
    if (block == blocks_of(t.numel) - 1 && end != t.body_bytes) return kLongBody;
    const u32* from_here = (const u32*)(pointer<const u8>(t.body) + from);
    if (a.small) prefetch_stretch(from_here, 4 * words);
    if (kind == kDense) return decode_dense<F, CODING>(n, from_here, words, lookup, table, window, rows);
    if (kind == kRaw) {
        if (words != (u32)(n * F::kItem + 3) / 4) return kBadRaw;
        if (F::kItem == 2 && n % 2 && ((const typename F::Bits*)from_here)[n]) return kBadRaw;
        rows.raw(from_here);
        return 0;
    }
    if (kind != kSparse) return kBadKind;
    if (words == 0) {
        rows.zeros();
        return 0;
    }
    if constexpr (CODING == kNear) return decode_sparse<FLOOR, ADD>(a, t, start, n, from_here, words, lists);
    return kStraySparse;
}

// Has what floors are made of brought to the L2 cache.
template <int FLOOR>
DEVICE void prefetch_floors(const Args& a, const Tensor& t, u64 start, int n) {
    Source<Float32, FLOOR> source(a, t, start);
    if (FLOOR >= kThetaFloor) prefetch_stretch(source.theta, 4 * (u32)n);
    if (FLOOR == kSecondFloor) prefetch_stretch(source.second, 4 * (u32)n);
}

// One group of blocks, as many as there are warps.
template <class F, int CODING, int FLOOR, bool ADD, int WARPS>
DEVICE void decode_group(const Args& a, u32 group, u32* table, u8* window, u32* room, u64* place) {
    u32 warp = warp_id();
    const Tensor& t = a.tensor[tensor_of_group(a, group)];
    bool shared_book = t.lengths != 0;
    const u8* body = pointer<const u8>(t.body);
    const u16* index = (const u16*)(body + index_offset(t.numel, shared_book));
    u64 n_blocks = blocks_of(t.numel), first = (u64)(group - t.first_group) * WARPS, block = first + warp;
    // The words before this group: of whole segments, and of the blocks before it in its own. One warp adds them up.
    __syncthreads();
    if (warp == 0) {
        u64 segment = first / kSegmentBlocks, before = 0;
        const u32* words = pointer<const u32>(a.words) + t.first_segment;
        for (u64 s = lane_id(); s < segment; s += 32) before += words[s];
        u64 b = segment * kSegmentBlocks + lane_id();
        if (b < first) before += index[b] & 0x3fff;
        __syncwarp();
        for (int step = 16; step; step >>= 1) before += __shfl_xor_sync(kAll, before, step);
        if (lane_id() == 0) *place = before;
    }
    __syncthreads();
    if (block >= n_blocks) return;
    u64 at = *place;
    for (u64 b = first; b < block; b++) at += index[b] & 0x3fff;
    u64 start = block * kBlock;
    int n = values_in(t, start);
    if (a.small) prefetch_floors<FLOOR>(a, t, start, n);
    u32 fault = decode_block<F, CODING, FLOOR, ADD>(
        a, t, block, uniform(index[block]), at,
        pointer<const u32>(a.codes) + (t.first_segment + block / kSegmentBlocks) * 256, table, window,
        pointer<u32>(a.slots) + (u64)(blockIdx.x * WARPS + warp) * (kSlotBytes / 4),
        DirectRows<F, CODING, FLOOR, ADD>{a, t, start, n, room});
    if (fault && lane_id() == 0) atomicOr(pointer<u32>(a.status), fault);
}

template <class F, int CODING, int FLOOR, bool ADD, int WARPS>
DEVICE void decode_blocks(const Args& a) {
    __shared__ u32 tables[WARPS][256];
    __shared__ __align__(kWindow) u32 windows[WARPS][kWindow / 4];
    __shared__ u32 rooms[WARPS][64];
    __shared__ u64 place;
    u32 warp = warp_id();
    // Unless read_segment found that there is nothing to decode, or nothing that this kernel can.
    if (!(*pointer<const u32>(a.status) & (kBadTable | kBadHead | kBadIndexPadding | kOtherCoding)))
        for (u32 group = blockIdx.x; group < (u32)a.groups; group += gridDim.x)
            decode_group<F, CODING, FLOOR, ADD, WARPS>(a, group, tables[warp], (u8*)windows[warp], rooms[warp], &place);
    __syncthreads();
    if (threadIdx.x == 0) {  // who ends last tells the host
        __threadfence();
        if (atomicAdd(pointer<u32>(a.ticket), 1u) == gridDim.x - 1) tell_status(a);
    }
}
