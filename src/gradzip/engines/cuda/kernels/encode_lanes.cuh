// The encoder of codings 1 and 2, near and paper: all kept bits go through the lanes, in one pass over the values. Blocks
// are written to a slot of scratch memory, and copied to where they belong once the lengths of those before are known.

// What decides a block's form. Sums are per lane until `add_up`.
struct LaneCounts {
    u32 fields = 0;     // values that are not 0
    u32 part_bits = 0;  // their lane parts
    u32 code_bits = 0;  // codes, with 8 bits for each escape
    u32 distances = 0;  // of the exponents from the floors
    u32 differs = 0;    // whether an exponent differs from the first one
};

DEVICE void add_up(LaneCounts& c) {
    u32 packed = sum(c.fields | c.part_bits << 14);  // at most 4096 and 98304
    c.fields = packed & 0x3fff;
    c.part_bits = packed >> 14;
    c.code_bits = sum(c.code_bits);
    c.distances = sum(c.distances);
    c.differs = any(c.differs != 0);
}

struct LaneRow {
    u32 v;
    FloorInput in;
};

template <int FLOOR>
DEVICE LaneRow load_row(const Tensor& t, const u32* x, u64 start, u32 i) { return {x[i], load_floor<FLOOR>(t, start + i)}; }

template <int CODING, int FLOOR>
DEVICE Mapped map_row(const Args& a, const Tensor& t, LaneRow row, int* floor) {
    *floor = make_floor<FLOOR>(row.in, t, a.shift);
    return map_lanes<CODING>(row.v, *floor);
}

template <int CODING>
DEVICE void count_value(LaneCounts& c, Mapped q, int floor, u32 entry, u32 first) {
    u32 e = (q.bits >> 23) & 255;
    c.fields += q.width > 0;
    c.part_bits += (u32)q.width;
    c.code_bits += (entry >> 16) & 31;
    if (CODING == kNear) c.distances += q.width > 0 ? (u32)distance((int)e, floor) : 0;
    c.differs |= e ^ first;
}

// The largest l with m * 2^l <= n.
DEVICE u32 low_width(u32 m, u32 n) {
    u32 l = 0;
    while ((m << (l + 1)) <= n) l++;
    return l;
}

// Where the parts of a sparse block begin, in bits.
struct SparseLayout {
    u32 low, highs, lengths, mantissas, end;

    __device__ SparseLayout(u32 m, u32 n, u32 distances, u32 kept) {
        low = low_width(m, n);
        highs = 32 + (m * (low + 1) + 7) / 8 * 8;
        lengths = highs + (m + ((n - 1) >> low) + 7) / 8 * 8;
        mantissas = lengths + (m + distances + 7) / 8 * 8;
        end = mantissas + (kept + 7) / 8 * 8;
    }
};

// The words of the sparse form, or 0 where it is not chosen.
DEVICE u32 sparse_words(const LaneCounts& c, u32 n) {
    u32 m = c.fields, kept = c.part_bits - m;
    if (2 * m > n || c.distances > 65535) return 0;
    SparseLayout at(m, n, c.distances, kept);
    u32 sparse = 32 + m * (at.low + 3) + ((n - 1) >> at.low) + c.distances + kept;
    u32 dense = 544 + (c.differs ? c.code_bits : 0) + c.part_bits;
    u32 words = (at.end + 31) / 32;
    return sparse < dense && words < n ? words : 0;
}

DEVICE void put_bits(u32* words, u32 at, u32 value, u32 width) {
    u32 shift = at & 31;
    atomicOr(words + (at >> 5), value << shift);
    if (shift + width > 32) atomicOr(words + (at >> 5) + 1, value >> (32 - shift));
}

template <int FLOOR>
DEVICE void write_sparse(const Args& a, const Tensor& t, u64 start, int n, const LaneCounts& c, u32 words, u32* block) {
    const u32* x = pointer<const u32>(t.values) + start;
    SparseLayout at(c.fields, (u32)n, c.distances, c.part_bits - c.fields);
    for (u32 i = lane_id(); i < words; i += 32) block[i] = 0;
    __threadfence_block();
    __syncwarp();
    if (lane_id() == 0) atomicOr(block, c.fields | c.distances << 16);
    u32 number = 0, d_before = 0, k_before = 0, lower = lower_lanes();
    for (int row = 0; row < n; row += 32) {
        u32 p = (u32)row + lane_id();
        Mapped q = {0, 0};
        int f = 0;
        if (p < (u32)n) q = map_row<kNear, FLOOR>(a, t, load_row<FLOOR>(t, x, start, p), &f);
        u32 votes = __ballot_sync(kAll, q.width > 0);
        if (votes == 0) continue;
        u32 d = q.width > 0 ? (u32)distance((int)((q.bits >> 23) & 255), f) : 0, k = q.width > 0 ? (u32)q.width - 1 : 0;
        u32 both = running_sum(d | k << 16);
        if (q.width > 0) {
            u32 i = number + (u32)__popc(votes & lower);
            put_bits(block, 32 + i * (at.low + 1), q.bits >> 31 | (p & ((1u << at.low) - 1)) << 1, at.low + 1);
            put_bits(block, at.highs + (p >> at.low) + i, 1, 1);
            put_bits(block, at.lengths + i + d_before + (both & 0xffff), 1, 1);
            if (k) put_bits(block, at.mantissas + k_before + (both >> 16) - k, (q.bits & 0x7fffff) >> (23 - k), k);
        }
        both = __shfl_sync(kAll, both, 31);
        number += (u32)__popc(votes);
        d_before += both & 0xffff;
        k_before += both >> 16;
    }
}

template <int CODING, int FLOOR>
DEVICE LaneCounts measure_lanes(const Args& a, const Tensor& t, u64 start, int n, const u32* table, u32 first) {
    const u32* x = pointer<const u32>(t.values) + start;
    LaneCounts c;
#pragma unroll 4
    for (u32 i = lane_id(); i < (u32)n; i += 32) {
        int f;
        Mapped q = map_row<CODING, FLOOR>(a, t, load_row<FLOOR>(t, x, start, i), &f);
        count_value<CODING>(c, q, f, table[(q.bits >> 23) & 255], first);
    }
    __syncwarp();
    add_up(c);
    return c;
}

// One row: phases 4 to 1 of the format.
template <int CODING>
DEVICE void push_lane_row(Lanes& lanes, Mapped q, u32 entry, bool escapes) {
    u32 bits = field_of<Float32>(q.bits) >> (24 - q.width);
    lanes.push_part(bits, q.width);
    if (CODING == kPaper) lanes.push(q.width ? (u32)(24 - q.width) / 6 : 0, q.width ? 2 : 0);
    lanes.push_exponent((q.bits >> 23) & 255, entry, escapes);
}

// Pushes all rows, the last one first. While four rows are coded, the next four are on their way.
template <int CODING, int FLOOR>
DEVICE LaneCounts push_lane_rows(const Args& a, const Tensor& t, u64 start, int n, const u32* table, u32 first, Lanes& lanes,
                                 u32* escapes) {
    const u32* x = pointer<const u32>(t.values) + start;
    LaneCounts c;
    u32 lane = lane_id(), seen = 0;
    int grouped = n & ~127;
    for (int row = (n + 31) / 32 * 32 - 32; row >= grouped; row -= 32) {
        u32 i = (u32)row + lane, entry = 0;
        Mapped q = {0, 0};
        if (i < (u32)n) {
            int f;
            q = map_row<CODING, FLOOR>(a, t, load_row<FLOOR>(t, x, start, i), &f);
            entry = table[(q.bits >> 23) & 255];
            count_value<CODING>(c, q, f, entry, first);
        }
        __syncwarp();
        bool now = any(entry & kEscapes);
        seen |= now;
        push_lane_row<CODING>(lanes, q, entry, now);
    }
    LaneRow next[4];
    if (grouped)
        for (int k = 0; k < 4; k++) next[k] = load_row<FLOOR>(t, x, start, (u32)grouped - 128 + 32 * (u32)k + lane);
    for (int row = grouped - 128; row >= 0; row -= 128) {
        LaneRow now[4];
        for (int k = 0; k < 4; k++) now[k] = next[k];
        u32 ahead = (u32)max_int(row - 128, 0) + lane;
        for (int k = 0; k < 4; k++) next[k] = load_row<FLOOR>(t, x, start, ahead + 32 * (u32)k);
        Mapped q[4];
        u32 entry[4];
        for (int k = 0; k < 4; k++) {
            int f;
            q[k] = map_row<CODING, FLOOR>(a, t, now[k], &f);
            entry[k] = table[(q[k].bits >> 23) & 255];
            count_value<CODING>(c, q[k], f, entry[k], first);
        }
        bool escaped = any((entry[0] | entry[1] | entry[2] | entry[3]) & kEscapes);
        seen |= escaped;
        for (int k = 3; k >= 0; k--) push_lane_row<CODING>(lanes, q[k], entry[k], escaped);
    }
    *escapes = seen;
    add_up(c);
    return c;
}

struct LaneForm {
    u32 kind, words;
};

// Codes a block into its slot. Raw blocks are left out: they are written straight to where they belong.
template <int CODING, int FLOOR>
DEVICE LaneForm code_lanes(const Args& a, const Tensor& t, u64 start, int n, const u32* codes, u32* table, u8* slot) {
    u32 e[8], nonzero;
    u32 base = sample_block<Float32, CODING, FLOOR, false>(a, t, start, n, e, &nonzero);
    make_block_table(codes, base, table);
    u32 first = __shfl_sync(kAll, e[0], 0);
    LaneCounts c;
    // Where most values are zero, look before coding: the lanes may not be wanted.
    if (CODING == kNear && 4 * nonzero < (u32)min_int(n, 256)) {
        c = measure_lanes<CODING, FLOOR>(a, t, start, n, table, first);
        if (c.fields == 0) return {kSparse, 0};
        if (u32 words = sparse_words(c, (u32)n)) {
            write_sparse<FLOOR>(a, t, start, n, c, words, (u32*)slot);
            return {kSparse, words};
        }
    }
    u32 escapes = 0;
    bool single = false;
    for (;;) {
        Lanes lanes(slot + 68);
        c = push_lane_rows<CODING, FLOOR>(a, t, start, n, table, first, lanes, &escapes);
        if (c.fields == 0) return {kSparse, 0};
        if (single || c.differs) {
            if (CODING == kNear)
                if (u32 words = sparse_words(c, (u32)n)) {
                    write_sparse<FLOOR>(a, t, start, n, c, words, (u32*)slot);
                    return {kSparse, words};
                }
            u32 words = finish_dense(slot, {0, 0, 1, escapes, single, single ? first : base, c.fields}, lanes);
            return words < (u32)n ? LaneForm{kDense, words} : LaneForm{kRaw, (u32)n};
        }
        single = true;  // known only now: once more, without symbols
        clear_block_table(table);
    }
}

template <int CODING, int FLOOR, int WARPS>
DEVICE void encode_lanes(const Args& a) {
    __shared__ u32 tables[WARPS][256];
    __shared__ u32 all_words[WARPS];
    __shared__ GroupRoom room;
    u32 warp = threadIdx.x >> 5;
    u8* slot = pointer<u8>(a.slots) + (u64)(blockIdx.x * WARPS + warp) * kSlotBytes;
    for (;;) {
        u32 group = next_group(a, room);
        if (group >= (u32)a.groups) return;
        int number = tensor_of_group(a, group);
        const Tensor& t = a.tensor[number];
        u64 block = (u64)(group - t.first_group) * WARPS + warp, start = block * kBlock;
        bool here = start < t.numel;
        int n = here ? (int)(t.numel - start < kBlock ? t.numel - start : kBlock) : 0;
        const u32* codes = pointer<const u32>(a.codes) + (t.first_segment + block / kSegmentBlocks) * kCodeStride;
        LaneForm form = {0, 0};
        if (here) form = code_lanes<CODING, FLOOR>(a, t, start, n, codes, tables[warp], slot);
        __threadfence_block();
        __syncwarp();
        u64 place = place_of_block<WARPS>(a, t, group, form.words, all_words, room);
        if (!here) continue;
        note_block(a, number, t, block, form.kind, form.words, place);
        u32* to = pointer<u32>(t.body + blocks_offset(t.numel, a.book) + 4 * place);
        if (form.kind == kRaw) {
            const u32* x = pointer<const u32>(t.values) + start;
            for (u32 i = lane_id(); i < (u32)n; i += 32) {
                int f;
                to[i] = map_row<CODING, FLOOR>(a, t, load_row<FLOOR>(t, x, start, i), &f).bits;
            }
        } else {
#pragma unroll 4
            for (u32 i = lane_id(); i < form.words; i += 32) to[i] = __ldcg((const u32*)slot + i);
        }
        __syncwarp();
    }
}
