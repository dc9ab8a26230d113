// The lanes of an encoder: stacks of bits, one per thread, that share a stream of refill bytes; and a block's code table.

// An entry of a block's code table, by exponent: code, length << 8, flags, cost << 16, zero << 28.
// Shifts take the low 5 bits of what they are given, so that `entry >> 8` serves as a length.
constexpr u32 kEscapes = 1u << 13, kSpecial = 1u << 14, kZero = 1u << 28;

// Sums of `entry >> 16` over up to 128 values.
DEVICE u32 cost_of(u32 total) { return total & 4095; }
DEVICE u32 zeros_of(u32 total) { return total >> 12; }

DEVICE void make_block_table(const u32* codes, u32 base, u32* table) {
    __syncwarp();
    for (u32 e = lane_id(); e < 256; e += 32) {
        u32 entry = codes[symbol_of(e, base)];
        bool escaped = entry == 0;
        if (escaped) entry = codes[256];
        u32 cost = (entry >> 8) + (escaped ? 8 : 0);
        table[e] = entry | (escaped ? kEscapes : 0) | (e == 255 ? kSpecial : 0) | (e == 0 ? kZero : 0) | cost << 16;
    }
    __syncwarp();
}

// In a block of one exponent nothing is pushed for it.
DEVICE void clear_block_table(u32* table) {
    __syncwarp();
    for (u32 e = lane_id(); e < 256; e += 32) table[e] = e == 255 ? kSpecial : 0;
    __syncwarp();
}

constexpr u32 kRing = 2048;  // bytes of shared memory, aligned to as many, where refill bytes wait to be written

struct Lanes {
    u32 state = 256;          // of this thread's lane
    u32 at = 0, written = 0;  // refill bytes so far, and how many have left the ring
    u8* ring;
    u8* refill;
    u32 lower = lower_lanes();

    __device__ __forceinline__ Lanes(u8* room, u8* to) : ring(room), refill(to) { __syncwarp(); }

    // `bits` has at most `count` mod 32 <= 8 bits.
    __device__ __forceinline__ void push(u32 bits, u32 count) {
#if defined(__CUDA_ARCH__)
        // As C++ this takes half as many instructions again.
        asm volatile(
            "{ .reg .pred full; .reg .b32 grown, votes, place;\n"
            "shf.l.wrap.b32 grown, 0, %0, %3;\n"
            "setp.gt.u32 full, grown, 65535;\n"
            "vote.sync.ballot.b32 votes, full, 0xffffffff;\n"
            "and.b32 place, votes, %5;\n"
            "popc.b32 place, place;\n"
            "add.u32 place, place, %1;\n"
            "and.b32 place, place, 2047;\n"
            "or.b32 place, place, %4;\n"
            "@full st.shared.u8 [place], %0;\n"
            "@full shr.u32 grown, %0, 8;\n"
            "@full shf.l.wrap.b32 grown, 0, grown, %3;\n"
            "or.b32 %0, grown, %2;\n"
            "popc.b32 votes, votes;\n"
            "add.u32 %1, %1, votes; }"
            : "+r"(state), "+r"(at)
            : "r"(bits), "r"(count), "r"((u32)__cvta_generic_to_shared(ring)), "r"(lower));
#else
        count &= 31;
        bool full = (state << count) >= 65536u;
        u32 votes = __ballot_sync(kAll, full);
        if (full) {
            ring[(at + (u32)__popc(votes & lower)) % kRing] = (u8)state;
            state >>= 8;
        }
        at += (u32)__popc(votes);
        state = (state << count) | bits;
#endif
    }

    // Symbols, and before them exponents that the code has no symbol for. `escapes` is equal in all lanes.
    __device__ __forceinline__ void push_exponent(u32 e, u32 entry, bool escapes) {
        if (escapes) push(entry & kEscapes ? e : 0, entry & kEscapes ? 8 : 0);
        push(entry & 255, entry >> 8);
    }

    // Lane parts of up to 24 bits in `chunks` bytes, the highest first.
    __device__ __forceinline__ void push_part(u32 bits, int width, int chunks) {
        if (chunks > 2) push(__byte_perm(bits, 0, 0x4442), (u32)max_int(width - 16, 0));
        if (chunks > 1) push(__byte_perm(bits, 0, 0x4441), (u32)max_int(0, min_int(width - 8, 8)));
        push(bits & 255, (u32)min_int(width, 8));
    }

    // Called after four rows at the most, which emit less than half a ring.
    __device__ __forceinline__ void write_half() {
        if (at - written >= kRing / 2) write(kRing / 2);
    }
    // Writes out the next `count` bytes. `refill` is aligned to words, unless `count` is the rest.
    __device__ __forceinline__ void write(u32 count) {
        __syncwarp();
        if ((u64)refill % 4 == 0 && count % 4 == 0) {
            u32 words = count / 4;
#pragma unroll 2
            for (u32 i = lane_id(); i < words; i += 32)
                ((u32*)(refill + written))[i] = ((const u32*)ring)[(written / 4 + i) % (kRing / 4)];
        } else {
#pragma unroll 1
            for (u32 i = lane_id(); i < count; i += 32) refill[written + i] = ring[(written + i) % kRing];
        }
        written += count;
        __syncwarp();
    }
    __device__ __forceinline__ void write_rest() { write(at - written); }
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
    return uniform(room.group);
}

// The words before this warp's block. All warps of the group come here, those without a block with `words` = 0.
template <int WARPS>
DEVICE u64 place_of_block(const Args& a, const Tensor& t, u32 group, u32 words, u32* all_words, GroupRoom& room) {
    u32 warp = warp_id();
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
