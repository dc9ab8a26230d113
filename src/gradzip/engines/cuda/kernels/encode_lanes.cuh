// The encoder of codings 1 and 2, near and paper: all kept bits go through the lanes, in one pass over the values. Blocks
// are written to a slot of scratch memory, and copied to where they belong once the lengths of those before are known.

constexpr u32 kLaneRoom = 2048;  // bytes of refill that wait in shared memory

// What decides whether a block is sparse; over all lanes.
struct LaneCounts {
    u32 fields, part_bits;  // values that are not 0, and bits of their lane parts
    u32 code_bits;          // of all codes and raw exponents
    bool exact;             // whether some have 24 lane bits
    bool single;            // whether all have the same exponent
};

struct LaneRow {
    u32 v;
    FloorInput in;
};

template <int FLOOR>
DEVICE LaneRow load_row(const Source<Float32, FLOOR>& s, u32 i) { return {__ldcs(s.x + i), load_floor(s, i)}; }

// Four rows, from value i of the first on.
template <int FLOOR>
DEVICE void load_rows(Source<Float32, FLOOR> s, int i, LaneRow rows[4]) {
    s.move(i);
    for (u32 k = 0; k < 4; k++) rows[k] = load_row(s, 32 * k);
}

template <int CODING, int FLOOR>
DEVICE Mapped map_row(const Source<Float32, FLOOR>& s, LaneRow row) { return map_lanes<CODING>(row.v, make_floor(s, row.in)); }

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

// Σ d of the format. A value of less than 24 lane bits has d = k.
template <int FLOOR>
DEVICE u32 all_distances(const Source<Float32, FLOOR>& s, u32 n, const LaneCounts& c) {
    u32 total = 0;
    if (!c.exact) return c.part_bits - c.fields;
    for (u32 i = lane_id(); i < n; i += 32) {
        int f = floor_at(s, i);
        Mapped q = map_near(s.x[i], f);
        total += q.width ? (u32)distance((int)q.e, f) : 0;
    }
    __syncwarp();
    return sum(total);
}

// The words of the sparse form, or 0 where it is not chosen.
template <int FLOOR>
DEVICE u32 sparse_words(const Source<Float32, FLOOR>& s, u32 n, const LaneCounts& c, u32* distances) {
    u32 m = c.fields, kept = c.part_bits - m;
    if (2 * m > n) return 0;
    *distances = all_distances(s, n, c);
    if (*distances > 65535) return 0;
    SparseLayout at(m, n, *distances, kept);
    u32 sparse = 32 + m * (at.low + 3) + ((n - 1) >> at.low) + *distances + kept;
    u32 dense = 544 + (c.single ? 0 : c.code_bits) + c.part_bits;
    u32 words = (at.end + 31) / 32;
    return sparse < dense && words < n ? words : 0;
}

DEVICE void put_bits(u32* words, u32 at, u32 value, u32 width) {
    u32 shift = at & 31;
    atomicOr(words + (at >> 5), value << shift);
    if (shift + width > 32) atomicOr(words + (at >> 5) + 1, value >> (32 - shift));
}

template <int FLOOR>
DEVICE void write_sparse(const Source<Float32, FLOOR>& s, int n, const LaneCounts& c, u32 distances, u32 words, u32* block) {
    SparseLayout at(c.fields, (u32)n, distances, c.part_bits - c.fields);
    for (u32 i = lane_id(); i < words; i += 32) block[i] = 0;
    __threadfence_block();
    __syncwarp();
    if (lane_id() == 0) atomicOr(block, c.fields | distances << 16);
    u32 number = 0, d_before = 0, k_before = 0, lower = lower_lanes();
    for (int row = 0; row < n; row += 32) {
        u32 p = (u32)row + lane_id();
        Mapped q = {0, 0, 0};
        int f = 0;
        if (p < (u32)n) {
            f = floor_at(s, p);
            q = map_near(s.x[p], f);
            q.bits = quiet(q.bits);
        }
        u32 votes = __ballot_sync(kAll, q.width > 0);
        if (votes == 0) continue;
        u32 d = q.width > 0 ? (u32)distance((int)q.e, f) : 0, k = q.width > 0 ? (u32)q.width - 1 : 0;
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

// Writes the sparse form if it is the one to choose; its words, or 0.
template <int CODING, int FLOOR>
DEVICE u32 try_sparse(const Source<Float32, FLOOR>& s, int n, const LaneCounts& c, u32* block) {
    if (CODING != kNear) return 0;
    u32 distances = 0, words = sparse_words(s, (u32)n, c, &distances);
    if (words) write_sparse(s, n, c, distances, words, block);
    return words;
}

template <int CODING, int FLOOR>
DEVICE LaneCounts measure_lanes(const Source<Float32, FLOOR>& s, int n, const u32* table, u32 first) {
    u32 part_bits = 0, code_bits = 0, zeros = 0;
    bool exact = false, differs = false;
#pragma unroll 4
    for (u32 i = lane_id(); i < (u32)n; i += 32) {
        Mapped q = map_row<CODING>(s, load_row(s, i));
        u32 entry = table[q.e];
        part_bits += (u32)q.width;
        code_bits += cost_of((u16)entry);
        zeros += q.e == 0;
        exact |= q.width == 24;
        differs |= q.e != first;
    }
    __syncwarp();
    return {(u32)n - sum(zeros), sum(part_bits), sum(code_bits), any(exact), !any(differs)};
}

// One row: phases 4 to 1 of the format.
template <int CODING>
DEVICE void push_lane_row(Lanes& lanes, u32 q, int width, u32 entry, bool escapes, bool chunked) {
    u32 field = choose(0x80000000u, q, q << 8);  // sign and mantissa on top
    lanes.push_part(field, width, chunked);
    if (CODING == kPaper) lanes.push((u32)(24 - width) / 6 << 30, width ? 2 : 0);
    lanes.push_exponent(q << 1, entry, escapes);
}

// What pushing gives besides.
struct Pushed {
    u32 escapes;  // whether there were some
    u32 fields;   // values that are not 0
};

// Pushes all rows, the last one first. While four rows are coded, the next four are on their way.
template <int CODING, int FLOOR>
DEVICE Pushed push_lane_rows(const Source<Float32, FLOOR>& s, int n, const u32* table, Lanes& lanes) {
    u32 lane = lane_id(), seen = 0, zeros = 0;
    int grouped = n & ~127;
    for (int row = (n + 31) / 32 * 32 - 32; row >= grouped; row -= 32) {
        u32 i = (u32)row + lane, entry = 0;
        Mapped q = {0, 0, 0};
        if (i < (u32)n) {
            q = map_row<CODING>(s, load_row(s, i));
            entry = table[q.e];
        }
        __syncwarp();
        seen |= entry;
        zeros += (entry & kZero) != 0;
        push_lane_row<CODING>(lanes, quiet(q.bits), q.width, entry, true, true);
        lanes.write_beyond(kLaneRoom - 768);
    }
    LaneRow next[4];
    if (grouped) load_rows(s, grouped - 128 + (int)lane, next);
#pragma unroll 1
    for (int row = grouped - 128; row >= 0; row -= 128) {
        u32 q[4], entry[4];
        int width[4];
        for (int k = 0; k < 4; k++) {
            u32 exponent;  // where it lies in a float
            if (CODING == kNear) {
                u32 grid = make_grid(s, next[k].in);
                q[k] = round_to(next[k].v, grid);
                exponent = q[k] & 0x7f800000u;
                width[k] = width_above(exponent, grid);
            } else {
                Mapped mapped = map_paper(next[k].v, make_floor(s, next[k].in));
                q[k] = mapped.bits, exponent = mapped.e << 23, width[k] = mapped.width;
            }
            entry[k] = *(const u32*)((const u8*)table + (exponent >> 21));
        }
        if (row > 0) load_rows(s, row - 128 + (int)lane, next);
        u32 flags = entry[0] | entry[1] | entry[2] | entry[3];
        if (any((flags & kUnusual) != 0)) {
            seen |= flags;
            for (int k = 0; k < 4; k++) {
                if (entry[k] & kZero) {
                    width[k] = 0;
                    zeros++;
                }
                if (entry[k] & kSpecial) q[k] = quiet(q[k]);
            }
            __syncwarp();
            int widest = max_int(max_int(width[0], width[1]), max_int(width[2], width[3]));
            bool chunked = any(widest > 8);
            for (int k = 3; k >= 0; k--) push_lane_row<CODING>(lanes, q[k], width[k], entry[k], true, chunked);
        } else {  // grids so coarse that no part has two chunks make zeros, too: it is not worth asking
            for (int k = 3; k >= 0; k--) push_lane_row<CODING>(lanes, q[k], width[k], entry[k], false, true);
        }
        lanes.write_beyond(kLaneRoom - 768);  // a row emits up to 6 bytes per lane
    }
    lanes.write_rest();
    return {any((seen & kEscapes) != 0), (u32)n - sum(zeros)};
}

struct LaneForm {
    u32 kind, words;
};

// Codes a block into its slot: head and states, then the refill stream. Raw blocks are left out.
template <int CODING, int FLOOR>
DEVICE LaneForm code_lanes(const Args& a, const Source<Float32, FLOOR>& s, int n, const u32* codes, u32* table, u8* room,
                           u8* slot) {
    u32 e[8], nonzero;
    u32 base = sample_block<Float32, CODING, FLOOR, false>(a, s, n, e, &nonzero);
    make_block_table(codes, base, table);
    u32 first = __shfl_sync(kAll, e[0], 0);
    bool differs = false;
    for (int k = 0; k < 8; k++) differs |= e[k] != first && e[k] < 256;
    // Where most values are zero or all are alike, look before coding: the lanes may not be wanted, or no symbols.
    bool single = false, looked = 2 * nonzero < (u32)min_int(n, 256) || !any(differs);
    if (looked) {
        LaneCounts c = measure_lanes<CODING>(s, n, table, first);
        if (c.fields == 0) return {kSparse, 0};
        if (u32 words = try_sparse<CODING>(s, n, c, (u32*)slot)) return {kSparse, words};
        single = c.single;
        if (single) clear_block_table(table);
    }
    Lanes lanes(room, slot + 68);
    Pushed pushed = push_lane_rows<CODING>(s, n, table, lanes);
    if (!looked && 2 * pushed.fields <= (u32)n)
        if (u32 words = try_sparse<CODING>(s, n, measure_lanes<CODING>(s, n, table, first), (u32*)slot))
            return {kSparse, words};
    u32 words = finish_dense(slot, {0, 0, 1, pushed.escapes, single, single ? first : base, pushed.fields}, lanes);
    return words < (u32)n ? LaneForm{kDense, words} : LaneForm{kRaw, (u32)n};
}

// Words of a slot to where they belong, in rounds that a warp waits for: the last, too, has all its words under way at once.
DEVICE void copy_slot(u32* to, const u32* from, u32 count) {
    constexpr u32 kRound = 8;
    u32 word[kRound], i = lane_id(), whole = count / (32 * kRound) * (32 * kRound);
#pragma unroll 1
    for (; i < whole; i += 32 * kRound) {
#pragma unroll
        for (u32 k = 0; k < kRound; k++) word[k] = __ldcg(from + i + 32 * k);
#pragma unroll
        for (u32 k = 0; k < kRound; k++) __stcs(to + i + 32 * k, word[k]);
    }
#pragma unroll
    for (u32 k = 0; k < kRound; k++)
        if (i + 32 * k < count) word[k] = __ldcg(from + i + 32 * k);
#pragma unroll
    for (u32 k = 0; k < kRound; k++)
        if (i + 32 * k < count) __stcs(to + i + 32 * k, word[k]);
}

// Brings a coded block to where it belongs.
template <int CODING, int FLOOR>
DEVICE void deliver(const Args& a, const Turn& turn, const Source<Float32, FLOOR>& source, LaneForm form, const u8* slot) {
    u32* to = (u32*)settle(a, turn, form.kind, form.words, await_place(a, turn, form.words));
    if (form.kind == kRaw) {
        for (u32 i = lane_id(); i < (u32)turn.n; i += 32) to[i] = quiet(map_row<CODING>(source, load_row(source, i)).bits);
    } else {
        copy_slot(to, (const u32*)slot, form.words);
    }
    __syncwarp();
}

// Shared memory of a warp; launch.py reserves as much.
struct LaneRoom {
    u8 refill[kLaneRoom];
    u32 table[256];
};

// A group is one warp. Its barrier tells the compiler that no lane has gone astray, and costs next to nothing.
template <int CODING, int FLOOR>
DEVICE void encode_lanes(const Args& a) {
    LaneRoom& room = ((LaneRoom*)dynamic_shared)[warp_id()];  // number 0; but so its address is kept in a register
    u8* slot = pointer<u8>(a.slots) + (u64)blockIdx.x * kSlotBytes;
    for (;;) {
        __syncthreads();
        u32 ticket = next_ticket(a);
        if (ticket >= (u32)a.groups) return;
        Turn turn = turn_of(a, ticket);
        Source<Float32, FLOOR> source(a, *turn.tensor, turn.start);
        if (a.small) {
            prefetch_stretch(source.x, 4 * (u32)turn.n);
            if (FLOOR >= kThetaFloor) prefetch_stretch(source.theta, 4 * (u32)turn.n);
            if (FLOOR == kSecondFloor) prefetch_stretch(source.second, 4 * (u32)turn.n);
        }
        LaneForm form = code_lanes<CODING>(a, source, turn.n, turn.codes, room.table, room.refill, slot);
        __threadfence_block();
        __syncwarp();
        announce(a, turn, form.words);
        deliver<CODING>(a, turn, source, form, slot);
    }
}
