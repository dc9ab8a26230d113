// The lanes of an encoder: stacks of bits, one per thread, that share a stream of refill bytes; and a block's code table.

// An entry of a block's code table, by exponent: code, length << 8, escape << 12, cost << 16, zero << 26.
constexpr u32 kEscapes = 1u << 12, kZero = 1u << 26;

DEVICE u32 entry_length(u32 entry) { return (entry >> 8) & 15; }

DEVICE void make_block_table(const u32* codes, u32 base, u32* table) {
    __syncwarp();
    for (u32 e = lane_id(); e < 256; e += 32) {
        u32 entry = codes[symbol_of(e, base)];
        u32 escaped = entry == 0;
        if (escaped) entry = codes[256];
        table[e] = entry | escaped << 12 | ((entry >> 8) + 8 * escaped) << 16 | (e == 0) << 26;
    }
    __syncwarp();
}

// In a block of one exponent nothing is pushed for it.
DEVICE void clear_block_table(u32* table) {
    __syncwarp();
    for (u32 e = lane_id(); e < 256; e += 32) table[e] = 0;
    __syncwarp();
}

struct Lanes {
    u32 state = 256;  // of this thread's lane
    u32 at = 0;       // refill bytes so far
    u8* refill;
    u32 lower = lower_lanes();

    __device__ __forceinline__ explicit Lanes(u8* to) : refill(to) {}

    // `bits` has at most `count` <= 8 bits.
    __device__ __forceinline__ void push(u32 bits, u32 count) {
        bool full = (state << count) >= 65536u;
        u32 votes = __ballot_sync(kAll, full);
        if (full) {
            refill[at + (u32)__popc(votes & lower)] = (u8)state;
            state >>= 8;
        }
        at += (u32)__popc(votes);
        state = (state << count) | bits;
    }

    // Symbols, and before them exponents that the code has no symbol for. `escapes` is equal in all lanes.
    __device__ __forceinline__ void push_exponent(u32 e, u32 entry, bool escapes) {
        if (escapes) push(entry & kEscapes ? e : 0, entry & kEscapes ? 8 : 0);
        push(entry & 255, entry_length(entry));
    }

    // Lane parts of up to 24 bits, the highest chunk first.
    __device__ __forceinline__ void push_part(u32 bits, int width) {
        if (any(width > 8)) {
            if (any(width > 16)) push((bits >> 16) & 255, (u32)max_int(width - 16, 0));
            push((bits >> 8) & 255, (u32)max_int(0, min_int(width - 8, 8)));
        }
        push(bits & 255, (u32)min_int(width, 8));
    }
};

struct DenseHead {
    u32 whole, rest, pruned, escapes, single, base, fields;
};

// Everything of a dense block but planes and refill. Returns its length in words.
DEVICE u32 finish_dense(u8* block, const DenseHead& h, const Lanes& lanes) {
    u32 bytes = 68 + h.whole * h.fields + lanes.at, padding = (0u - bytes) & 3;
    if (lane_id() == 0)
        *(u32*)block = h.whole | h.rest << 2 | h.pruned << 5 | h.escapes << 6 | h.single << 7 | h.base << 8 |
                       h.fields << 16 | padding << 30;
    ((u16*)(block + 4))[lane_id()] = (u16)lanes.state;
    if (lane_id() < padding) block[bytes + lane_id()] = 0;
    return (bytes + 3) / 4;
}

// --- Where blocks go -----------------------------------------------------------------------------------------------
// A group of blocks is as many as there are warps. Each group adds up its words, and looks back at the groups before for
// the sum of all words before it. Groups are handed out in order, so that those before are done or under way.

constexpr u64 kPartKnown = 1ull << 62, kSumKnown = 2ull << 62, kWordsMask = (1ull << 62) - 1;

// For one warp: the words before the group, which has `own` words. Publishes the sum up to its end.
DEVICE u64 look_back(u64* progress, u32 group, u32 first_group, u64 own) {
    u64 before = 0;
    if (group > first_group) {
        if (lane_id() == 0) *(volatile u64*)(progress + group) = kPartKnown | own;
        long long nearest = (long long)group - 1;
        bool found = false;
        while (!found) {
            long long other = nearest - lane_id();
            u64 seen = kSumKnown;  // before the first group there is nothing
            if (other >= (long long)first_group)
                do seen = *(volatile u64*)(progress + other);
                while (seen >> 62 == 0);
            u32 sums = __ballot_sync(kAll, seen >> 62 == 2);
            u32 last = sums ? (u32)__ffs((int)sums) - 1 : 31;
            u64 part = lane_id() <= last ? seen & kWordsMask : 0;
            for (int step = 16; step; step >>= 1) part += __shfl_xor_sync(kAll, part, step);
            before += part;
            found = sums != 0;
            nearest -= 32;
        }
    }
    if (lane_id() == 0) *(volatile u64*)(progress + group) = kSumKnown | (before + own);
    return before;
}

struct GroupRoom {
    u32 group;
    u64 place;
};

// The next group of blocks to code, or one past the last.
DEVICE u32 next_group(const Args& a, GroupRoom& room) {
    __syncthreads();
    if (threadIdx.x == 0) room.group = atomicAdd(pointer<u32>(a.ticket), 1u);
    __syncthreads();
    return room.group;
}

// The words before this warp's block. All warps of the group come here, those without a block with `words` = 0.
template <int WARPS>
DEVICE u64 place_of_block(const Args& a, const Tensor& t, u32 group, u32 words, u32* all_words, GroupRoom& room) {
    u32 warp = threadIdx.x >> 5;
    if (lane_id() == 0) all_words[warp] = words;
    __syncthreads();
    if (warp == 0) {
        u64 own = 0;
        for (int w = 0; w < WARPS; w++) own += all_words[w];
        u64 before = look_back(pointer<u64>(a.progress), group, t.first_group, own);
        if (lane_id() == 0) room.place = before;
    }
    __syncthreads();
    u64 place = room.place;
    for (u32 w = 0; w < warp; w++) place += all_words[w];
    return place;
}

// The block's entry in the index, and with the last block the size of the body.
DEVICE void note_block(const Args& a, int number, const Tensor& t, u64 block, u32 kind, u32 words, u64 place) {
    if (lane_id() != 0) return;
    pointer<u16>(t.body + index_offset(t.numel, a.book))[block] = (u16)(words | kind << 14);
    if (block == blocks_of(t.numel) - 1) {
        pointer<volatile u64>(a.sizes)[number] = blocks_offset(t.numel, a.book) + 4 * (place + words);
        pointer<volatile u64>(a.sizes)[kMaxTensors] = *pointer<u32>(a.status);
    }
}
