// Code tables: sampling, code lengths by package-merge, canonical codes for the encoder, lookup tables for the decoder.
// One group of 256 threads per segment, one thread per symbol.

constexpr int kMinShare = 1024;  // a symbol rarer than 1/1024 is left to the escape

// What making canonical codes of lengths takes.
struct CodeRoom {
    u32 tally[8][10];     // symbols of each length, by warp
    u32 sums[16];
    u8 length[257];
};

// What choosing lengths takes besides.
struct TableRoom : CodeRoom {
    u32 count[257];       // by symbol, 256 being the escape
    u32 weight[257];      // by place in the order of (weight, symbol)
    u16 symbol[257];
    u32 level[2][516];    // weights of one level of package-merge and the next
    u16 place[8][257];    // where each leaf stands in a level's list
    u32 histogram[8][256];
};

// Sums over all 256 threads; every thread gets the total.
DEVICE u32 group_sum(u32 v, u32* room) {
    u32 warp = threadIdx.x >> 5;
    u32 part = sum(v);
    __syncthreads();
    if (lane_id() == 0) room[warp] = part;
    __syncthreads();
    u32 total = 0;
    for (int w = 0; w < 8; w++) total += room[w];
    return total;
}

// Of those threads whose flag is set: how many come before this one.
DEVICE u32 group_rank(bool flag, u32* room) {
    u32 warp = threadIdx.x >> 5;
    u32 votes = __ballot_sync(kAll, flag);
    __syncthreads();
    if (lane_id() == 0) room[warp] = (u32)__popc(votes);
    __syncthreads();
    u32 before = (u32)__popc(votes & lower_lanes());
    for (u32 w = 0; w < warp; w++) before += room[w];
    return before;
}

// The sampled exponents of a block: of rows 0, 16, 32, ... Thread = lane; eight values each, 256 where there is none.
template <class F, int CODING, int FLOOR, bool KEEP>
DEVICE u32 sample_block(const Args& a, const Source<F, FLOOR>& source, int n, u32 e[8], u32* nonzero) {
    u32 v[8];
    FloorInput in[8];
    for (int k = 0; k < 8; k++) {
        int i = 512 * k + (int)lane_id();
        v[k] = i < n ? source.x[i] : 0;
        in[k] = i < n ? load_floor(source, (u32)i) : FloorInput{0, 0};
    }
    u32 total = 0, count = 0;
    for (int k = 0; k < 8; k++) {
        u32 q = CODING == kFixed ? map_fixed<F, KEEP>(v[k], a)
                                 : map_lanes<CODING>(v[k], make_floor(source, in[k])).bits;
        bool here = 512 * k + (int)lane_id() < n;
        e[k] = here ? exponent_of<F>(q) : 256;
        total += here ? e[k] : 0;
        count += here && e[k] != 0;
    }
    total = sum(total);
    count = sum(count);
    *nonzero = count;
    return count ? (total + count / 2) / count : 0;  // the block's base
}

// Counts the symbols of a segment's sampled rows into room.count.
template <class F, int CODING, int FLOOR, bool KEEP>
DEVICE void sample_segment(const Args& a, const Tensor& t, u64 segment, TableRoom& room) {
    u32 warp = threadIdx.x >> 5;
    // Each thread of a warp has one of the rows fetched that the warp will look at.
    u64 row = (segment * kSegmentBlocks + warp + 8 * (lane_id() / 8)) * kBlock + 512 * (lane_id() & 7);
    if (row < t.numel) {
        Source<F, FLOOR> source(a, t, row);
        prefetch(source.x);
        if (FLOOR != kNoFloor) prefetch(FLOOR == kInt8Floor ? (const void*)source.given : source.theta);
        if (FLOOR == kSecondFloor) prefetch(source.second);
    }
    for (u32 s = lane_id(); s < 256; s += 32) room.histogram[warp][s] = 0;
    __syncwarp();
    for (u32 b = warp; b < (u32)kSegmentBlocks; b += 8) {
        u64 start = (segment * kSegmentBlocks + b) * kBlock;
        if (start >= t.numel) break;
        int n = values_in(t, start);
        u32 e[8], nonzero;
        u32 base = sample_block<F, CODING, FLOOR, KEEP>(a, Source<F, FLOOR>(a, t, start), n, e, &nonzero);
        for (int k = 0; k < 8; k++)
            if (nonzero && e[k] < 256) atomicAdd(&room.histogram[warp][symbol_of(e[k], base)], 1u);
    }
    __syncthreads();
    u32 total = 0;
    for (int w = 0; w < 8; w++) total += room.histogram[w][threadIdx.x];
    room.count[threadIdx.x] = total;
    __syncthreads();
}

// How many of the first `count` entries of an ascending list are below v, or at most v.
DEVICE u32 below(const u32* list, u32 count, u32 v, bool or_equal) {
    u32 low = 0, high = count;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (list[middle] < v || (or_equal && list[middle] == v)) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Optimal lengths of at most `limit` bits for room.count, into room.length (0: no code); the escape's at 256.
DEVICE void code_lengths(TableRoom& room, int limit) {
    u32 s = threadIdx.x, mine = room.count[s];
    u32 total = group_sum(mine, room.sums);
    bool coded = mine > 0 && (u64)mine * kMinShare >= total;
    u32 places = (1u << limit) - 1;  // the escape needs one as well
    if (group_sum(coded, room.sums) > places) {
        u32 before = 0;  // in the order of falling counts, equal ones in that of symbols
        for (u32 o = 0; o < 256; o++) {
            u32 other = room.count[o];
            if (other > 0 && (u64)other * kMinShare >= total) before += other > mine || (other == mine && o < s);
        }
        coded = coded && before < places;
    }
    u32 covered = group_sum(coded ? mine : 0, room.sums);
    u32 leaves = group_sum(coded, room.sums) + 1;
    room.length[s] = 0;
    // Leaves in symbol order, then sorted by (weight, symbol); the escape has the highest symbol.
    u32 at = group_rank(coded, room.sums);
    if (coded) room.level[0][at] = mine;
    if (s == 0) room.level[0][leaves - 1] = total > covered ? total - covered : 1;
    __syncthreads();
    for (u32 i = s; i < leaves; i += 256) {
        u32 w = room.level[0][i], rank = 0;
        for (u32 j = 0; j < leaves; j++) {
            u32 other = room.level[0][j];
            rank += other < w || (other == w && j < i);
        }
        room.weight[rank] = w;
        room.level[1][i] = rank;
    }
    __syncthreads();
    if (coded) room.symbol[room.level[1][at]] = (u16)s;
    if (s == 0) room.symbol[room.level[1][leaves - 1]] = 256;
    __syncthreads();
    for (u32 i = s; i < leaves; i += 256) {
        room.level[0][i] = room.weight[i];
        room.place[0][i] = (u16)i;
    }
    // Each level's list merges the leaves with pairs of the level before; of equal ones leaves come first.
    u32 size = leaves;
    for (int l = 1; l < limit; l++) {
        __syncthreads();
        u32* from = room.level[(l + 1) & 1];
        u32* to = room.level[l & 1];
        u32 pairs = size / 2;
        u32 pair = s < pairs ? from[2 * s] + from[2 * s + 1] : 0;
        u32 late = s + 256 < pairs ? from[2 * s + 512] + from[2 * s + 513] : 0;
        __syncthreads();
        if (s < pairs) from[s] = pair;
        if (s + 256 < pairs) from[s + 256] = late;
        __syncthreads();
        for (u32 i = s; i < leaves; i += 256) {
            u32 place = i + below(from, pairs, room.weight[i], false);
            room.place[l][i] = (u16)place;
            to[place] = room.weight[i];
        }
        for (u32 i = s; i < pairs; i += 256) to[i + below(room.weight, leaves, from[i], true)] = from[i];
        size = leaves + pairs;
    }
    __syncthreads();
    // A prefix of the last list is taken; the leaves in it grow by a bit, the pairs say how much to take before.
    u32 chosen = 2 * leaves - 2, length = 0, longer = 0;
    for (int l = limit - 1; l >= 0; l--) {
        bool taken = s < leaves && room.place[l][s] < chosen;
        bool last = s == 0 && leaves == 257 && room.place[l][256] < chosen;
        length += taken;
        longer += last;
        chosen = 2 * (chosen - group_sum(taken + last, room.sums));
    }
    if (s < leaves) room.length[room.symbol[s]] = (u8)length;
    if (s == 0 && leaves == 257) room.length[room.symbol[256]] = (u8)longer;
    __syncthreads();
}

// A code and its length, the code's first bit lowest.
DEVICE u32 reversed(u32 code, u32 length) { return length ? __brev(code) >> (32 - length) : 0; }
// The same as the encoder wants it: the code in the uppermost bits.
DEVICE u32 entry_of(u32 code, u32 length) { return length ? reversed(code, length) << (32 - length) | length : 0; }

// A thread's symbol's code, and the escape's; not reversed.
struct Codes {
    u32 length, code, escape_length, escape_code;
    bool complete;  // whether the lengths leave a power of two to the escape; else there is no code but the escape
};

// Of room.length, which is cleared if it is no complete code.
DEVICE Codes canonical(CodeRoom& room) {
    u32 s = threadIdx.x, warp = s >> 5, length = room.length[s], rank = 0;
    for (u32 l = 1; l <= 9; l++) {  // 9 stands for all that are too long
        u32 votes = __ballot_sync(kAll, l == 9 ? length > 8 : length == l);
        if (length == l) rank = (u32)__popc(votes & lower_lanes());
        if (lane_id() == l) room.tally[warp][l] = (u32)__popc(votes);
    }
    __syncthreads();
    u32 count[10], used = 0;
#pragma unroll
    for (u32 l = 1; l <= 9; l++) {
        count[l] = 0;
#pragma unroll
        for (u32 w = 0; w < 8; w++) {
            if (l == length && w == warp) rank += count[l];
            count[l] += room.tally[w][l];
        }
        used += count[l] * (256u >> l);
    }
    u32 left = 256 - used;
    Codes c = {0, 0, 0, 0, !count[9] && used < 256 && (left & (left - 1)) == 0};
    if (c.complete) c.length = length, c.escape_length = 8 - (31 - (u32)__clz((int)left));
    u32 next = 0;
#pragma unroll
    for (u32 l = 1; l <= 8; l++) {
        if (c.length == l) c.code = next + rank;
        if (c.escape_length == l) c.escape_code = next + count[l];
        next = (next + count[l] + (c.escape_length == l)) << 1;
    }
    room.length[s] = (u8)c.length;
    __syncthreads();
    return c;
}

// What the encoder gets of them.
DEVICE void write_codes(const Codes& c, u32* codes) {
    codes[threadIdx.x] = c.length ? entry_of(c.code, c.length) : 0;
    if (threadIdx.x == 0) codes[256] = entry_of(c.escape_code, c.escape_length);
}

// What the decoder gets of them: symbol | length << 9 for each value of a state's low 8 bits.
DEVICE void write_lookup(const Codes& c, u32* lookup) {
    u32 s = threadIdx.x, first = reversed(c.code, c.length);
    // A code of l bits stands for every value of the low 8 bits that begins with it. Short ones are left to the whole warp.
    bool is_short = c.length && c.length <= 4;
    if (c.length && !is_short)
        for (u32 v = first; v < 256; v += 1u << c.length) lookup[v] = s | c.length << 9;
    __syncwarp();
    for (u32 left = __ballot_sync(kAll, is_short); left; left &= left - 1) {
        int whose = __ffs((int)left) - 1;
        u32 entry = __shfl_sync(kAll, s | c.length << 9, whose), begin = __shfl_sync(kAll, first, whose), length = entry >> 9;
        for (u32 v = begin + (lane_id() << length); v < 256; v += 32u << length) lookup[v] = entry;
        __syncwarp();
    }
    if (s < (256u >> c.escape_length))
        lookup[reversed(c.escape_code, c.escape_length) + (s << c.escape_length)] = 256 | c.escape_length << 9;
}

// The code lengths that a segment is encoded with, to room.length.
template <class F, int CODING, int FLOOR, bool KEEP>
DEVICE void choose_lengths(const Args& a, const Tensor& t, u64 segment, TableRoom& room) {
    u32 s = threadIdx.x;
    if (t.lengths) {
        room.length[s] = pointer<const u8>(t.lengths)[segment * 256 + s];
    } else if (t.tables) {
        u32 nibbles = pointer<const u8>(t.tables)[8 + segment * 128 + s / 2];
        room.length[s] = (u8)((nibbles >> 4 * (s & 1)) & 15);
    } else {
        sample_segment<F, CODING, FLOOR, KEEP>(a, t, segment, room);
        code_lengths(room, a.limit);
    }
    __syncthreads();
}

// A segment's table as it is stored; and the body's head, with the first.
template <int CODING>
DEVICE void store_table(const Args& a, const Tensor& t, u64 segment, const TableRoom& room) {
    u32 s = threadIdx.x;
    u8* body = pointer<u8>(t.body);
    if (!a.book && s < 128) body[8 + segment * 128 + s] = (u8)(room.length[2 * s] | room.length[2 * s + 1] << 4);
    if (segment == 0 && s == 0) {
        u32* words = (u32*)body;
        words[0] = (u32)CODING | (a.book != 0) << 8;
        words[1] = (u32)a.book;
    }
}

// The length that this thread's symbol was encoded with.
DEVICE u32 stored_length(const Tensor& t, u64 segment) {
    u32 s = threadIdx.x;
    if (t.lengths) return pointer<const u8>(t.lengths)[segment * 256 + s];
    return (pointer<const u8>(t.body)[8 + segment * 128 + s / 2] >> 4 * (s & 1)) & 15;
}

// The head of a body. Reading and judging it are apart, so that the memory may take its time.
struct BodyHead {
    u32 head, book, index_end;
};

DEVICE BodyHead read_head(const Tensor& t) {
    const u32* words = pointer<const u32>(t.body);
    return {words[0], words[1], words[blocks_offset(t.numel, t.lengths != 0) / 4 - 1]};
}

// What is wrong with it, for a decoder of this coding.
DEVICE u32 judge_head(const Args& a, const Tensor& t, BodyHead h) {
    bool wrong = t.lengths ? (h.head >> 8) != 1 || h.book == 0 : (h.head >> 8) != 0 || h.book != 0;
    if (wrong || (h.head & 255) > 2) return kBadHead;
    if ((h.head & 255) != (u32)a.coding) return (u32)kOtherCoding | (h.head & 255) << 16;
    return blocks_of(t.numel) % 2 && h.index_end >> 16 ? (u32)kBadIndexPadding : 0;
}

// --- Kernels -------------------------------------------------------------------------------------------------------

// Of one segment: its codes, its stored table; and what the encoder finds cleared.
template <class F, int CODING, int FLOOR, bool KEEP>
DEVICE void plan_segment(const Args& a) {
    __shared__ TableRoom room;
    u32 number = blockIdx.x, s = threadIdx.x;
    const Tensor& t = a.tensor[tensor_of_segment(a, number)];
    u64 segment = number - t.first_segment;
    if (a.counts) {
        sample_segment<F, CODING, FLOOR, KEEP>(a, t, segment, room);
        pointer<u32>(a.counts)[number * 256 + s] = room.count[s];
        return;
    }
    for (u32 g = number * 256 + s; g < (u32)a.groups; g += gridDim.x * 256) pointer<u64>(a.progress)[g] = 0;
    if (number == 0 && s == 0) *pointer<u32>(a.ticket) = 0;
    choose_lengths<F, CODING, FLOOR, KEEP>(a, t, segment, room);
    Codes c = canonical(room);
    if (!c.complete && s == 0) atomicOr(pointer<u32>(a.status), (u32)kBadTable);
    write_codes(c, pointer<u32>(a.codes) + number * kCodeStride);
    store_table<CODING>(a, t, segment, room);
    // The last word of the index may be half padding; its block overwrites the other half.
    if (segment == 0 && s == 0) pointer<u32>(t.body)[blocks_offset(t.numel, a.book) / 4 - 1] = 0;
}

// Of one segment: its lookup table and its length in words.
DEVICE void read_segment(const Args& a) {
    __shared__ CodeRoom room;
    u32 number = blockIdx.x, s = threadIdx.x;
    const Tensor& t = a.tensor[tensor_of_segment(a, number)];
    u64 segment = number - t.first_segment, n_blocks = blocks_of(t.numel);
    u32* status = pointer<u32>(a.status);
    if (number == 0 && s == 0) *pointer<u32>(a.ticket) = 0;
    room.length[s] = (u8)stored_length(t, segment);
    __syncthreads();
    Codes c = canonical(room);
    if (!c.complete && s == 0) atomicOr(status, (u32)kBadTable);
    write_lookup(c, pointer<u32>(a.codes) + number * 256);

    const u16* index = pointer<const u16>(t.body + index_offset(t.numel, t.lengths != 0));
    u64 block = segment * kSegmentBlocks + s;
    u32 words = s < (u32)kSegmentBlocks && block < n_blocks ? index[block] & 0x3fff : 0;
    words = group_sum(words, room.sums);
    if (s == 0) pointer<u32>(a.words)[number] = words;
    if (segment == 0 && s == 0)
        if (u32 fault = judge_head(a, t, read_head(t))) atomicOr(status, fault);
}
