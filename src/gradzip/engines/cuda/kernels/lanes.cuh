// The lanes of an encoder: stacks of bits, one per thread, that share a stream of refill bytes; and a block's code table.

// An entry of a block's code table, by exponent: length, flags, code in the uppermost bits. Shifts take the low 5 bits of
// what they are given, so that an entry serves as a length; and a funnel shift brings the code into a state from above.
// Lengths and two of the flags have room for sums over 32 entries.
constexpr u32 kZero = 1u << 9, kEscapes = 1u << 15, kSpecial = 1u << 16;
constexpr u32 kUnusual = kZero | kEscapes | kSpecial;

// Of a sum of up to 32 entries, taken modulo 2^16: bits of codes and raw exponents, and how many were 0.
DEVICE u32 cost_of(u32 total) { return (total & 511) + 8 * (total >> 15); }
DEVICE u32 zeros_of(u32 total) { return (total >> 9) & 63; }

DEVICE u32 flags_of(u32 e) { return (e == 255 ? kSpecial : 0) | (e == 0 ? kZero : 0); }

DEVICE void make_block_table(const u32* codes, u32 base, u32* table) {
    __syncwarp();
    for (u32 e = lane_id(); e < 256; e += 32) {
        u32 entry = codes[symbol_of(e, base)];
        if (entry == 0) entry = codes[256] | kEscapes;
        table[e] = entry | flags_of(e);
    }
    __syncwarp();
}

// In a block of one exponent nothing is pushed for it.
DEVICE void clear_block_table(u32* table) {
    __syncwarp();
    for (u32 e = lane_id(); e < 256; e += 32) table[e] = flags_of(e);
    __syncwarp();
}

// From shared memory, aligned to words, to anywhere; as words where that can be, since bytes take the memory long. By as
// many threads.
DEVICE void copy_words(u8* to, const u8* from, u32 count, u32 thread, u32 threads) {
    u32 head = min_u32((0u - (u32)(u64)to) & 3, count), words = (count - head) / 4, done = head + 4 * words;
    u32* target = (u32*)(to + head);
    const u32* source = (const u32*)from;
    if (thread < head) to[thread] = from[thread];
    if (head == 0) {
#pragma unroll 2
        for (u32 i = thread; i < words; i += threads) target[i] = source[i];
    } else {
#pragma unroll 2
        for (u32 i = thread; i < words; i += threads) target[i] = __funnelshift_r(source[i], source[i + 1], 8 * head);
    }
    if (thread < count - done) to[done + thread] = from[done + thread];
}

DEVICE void copy_bytes(u8* to, const u8* from, u32 count) {
    __syncwarp();
    copy_words(to, from, count, lane_id(), 32);
    __syncwarp();
}

struct Lanes {
    u32 state = 256;  // of this thread's lane
    u8* room;         // shared memory, aligned to words, where refill bytes wait to be written
    u8* refill;       // where they belong
    u32 base, at;     // where the room begins and where the next byte goes, as addresses of shared memory
    u32 written = 0;  // bytes that have left the room
    u32 lower = lower_lanes();
    u32 bound;        // what states stay below: 65536, in a way that keeps it in a register

    __device__ __forceinline__ Lanes(u8* shared, u8* to) : room(shared), refill(to) {
#if defined(__CUDA_ARCH__)
        base = at = (u32)__cvta_generic_to_shared(room);
#else
        base = at = 0;
#endif
        __syncwarp();
        volatile u32* own = (volatile u32*)room + lane_id();
        *own = 65536;
        bound = *own;
        __syncwarp();
    }

    // Pushes the uppermost `count` mod 32 <= 8 bits of `top`.
    __device__ __forceinline__ void push(u32 top, u32 count) {
#if defined(__CUDA_ARCH__)
        // As C++ this takes half as many instructions again.
        asm volatile(
            "{ .reg .pred full; .reg .b32 limit, votes, place;\n"
            "shf.r.wrap.b32 limit, %5, 0, %3;\n"
            "setp.ge.u32 full, %0, limit;\n"
            "vote.sync.ballot.b32 votes, full, 0xffffffff;\n"
            "and.b32 place, votes, %4;\n"
            "popc.b32 place, place;\n"
            "add.u32 place, place, %1;\n"
            "@full st.shared.u8 [place], %0;\n"
            "@full shr.u32 %0, %0, 8;\n"
            "shf.l.wrap.b32 %0, %2, %0, %3;\n"
            "popc.b32 votes, votes;\n"
            "add.u32 %1, %1, votes; }"
            : "+r"(state), "+r"(at)
            : "r"(top), "r"(count), "r"(lower), "r"(bound));
#else
        bool full = state >= bound >> (count & 31);
        u32 votes = __ballot_sync(kAll, full);
        if (full) {
            room[at + (u32)__popc(votes & lower)] = (u8)state;
            state >>= 8;
        }
        at += (u32)__popc(votes);
        state = __funnelshift_l(top, state, count);
#endif
    }

    // Symbols, and before them exponents (in the uppermost 8 bits of `raw`) that the code has no symbol for. `escapes`:
    // whether there may be some; equal in all lanes.
    __device__ __forceinline__ void push_exponent(u32 raw, u32 entry, bool escapes) {
        if (escapes && any((entry & kEscapes) != 0)) push(raw, entry & kEscapes ? 8 : 0);
        push(entry, entry);
    }

    // Lane parts of up to 24 bits, given from bit 31 down, the highest chunk first. `chunked`: whether some may have more
    // than one; equal in all lanes.
    __device__ __forceinline__ void push_part(u32 top, int width, bool chunked) {
        if (chunked) {
            if (any(width > 16)) {
                u32 count = (u32)max_int(width - 16, 0);
                push(top, count);
                top <<= count;
            }
            int eight = (int)(bound >> 13);
            u32 count = (u32)max_int(0, min_int(width - eight, eight));
            push(top, count);
            top <<= count;
        }
        push(top, (u32)min_int(width, 8));
    }

    __device__ __forceinline__ u32 emitted() const { return written + (at - base); }

    // Writes out what is in the room if that is more than `limit` bytes; up to 3 bytes stay, so that words stay words.
    __device__ __forceinline__ void write_beyond(u32 limit) {
        if (at - base <= limit) return;
        u32 count = (at - base) & ~3u, left = (at - base) & 3;
        copy_bytes(refill + written, room, count);
        u8 byte = lane_id() < left ? room[count + lane_id()] : 0;
        __syncwarp();
        if (lane_id() < left) room[lane_id()] = byte;
        __syncwarp();
        written += count;
        at = base + left;
    }
    __device__ __forceinline__ void write_rest() {
        copy_bytes(refill + written, room, at - base);
        written += at - base;
        at = base;
    }
};

struct DenseHead {
    u32 whole, rest, pruned, escapes, single, base, fields;
};

// Everything of a dense block but planes and refill. Returns its length in words.
DEVICE u32 finish_dense(u8* block, const DenseHead& h, const Lanes& lanes) {
    u32 bytes = 68 + h.whole * h.fields + lanes.emitted(), padding = (0u - bytes) & 3;
    if (lane_id() == 0)
        *(u32*)block = h.whole | h.rest << 2 | h.pruned << 5 | h.escapes << 6 | h.single << 7 | h.base << 8 |
                       h.fields << 16 | padding << 30;
    ((u16*)(block + 4))[lane_id()] = (u16)lanes.state;
    if (lane_id() < padding) block[bytes + lane_id()] = 0;
    return uniform((bytes + 3) / 4);
}

// --- Where blocks go -----------------------------------------------------------------------------------------------
// A warp takes the next block, finds out how long it is and announces that. The words of all blocks before it are summed
// up from their announcements. Blocks are handed out in order, so that those before are done or under way.

constexpr u64 kPartKnown = 1ull << 62, kSumKnown = 2ull << 62;
constexpr u32 kWordBits = 40;  // of an announcement; above them is the launch's epoch, so that nothing need be cleared

struct Turn {
    const Tensor* tensor;
    int number;     // of the tensor
    u32 turn;       // of the block, among those of all tensors
    u64 block, start;
    int n;          // values in it
    const u32* codes;
};

// The next block to code, from `a.groups` on there is none.
DEVICE u32 next_ticket(const Args& a) {
    u32 ticket = 0;
    if (lane_id() == 0) ticket = atomicAdd(pointer<u32>(a.ticket), 1u);
    return uniform(ticket);
}

DEVICE Turn turn_of(const Args& a, u32 ticket) {
    int number = tensor_of_group(a, ticket);
    const Tensor& t = a.tensor[number];
    u64 block = ticket - t.first_group, start = block * kBlock;
    return {&t, number, ticket, block, start, values_in(t, start),
            pointer<const u32>(a.codes) + (t.first_segment + block / kSegmentBlocks) * kCodeStride};
}

DEVICE u64 announcement(const Args& a, u64 known, u64 words) { return known | (u64)a.epoch << kWordBits | words; }

DEVICE void announce(const Args& a, const Turn& turn, u32 words) {
    if (lane_id() == 0)
        *pointer<volatile u64>(a.progress + 8 * (u64)turn.turn) =
            announcement(a, turn.block ? kPartKnown : kSumKnown, words);
}

// What the block `distance` before this one announced, once it has; before the first block there is nothing.
template <u32 MORE>
DEVICE void await_announcements(const Args& a, const Turn& turn, u32 distance, u64 seen[MORE]) {
    const volatile u64* progress = pointer<const volatile u64>(a.progress) + turn.turn;
    u64 none = announcement(a, 0, 0);
    for (;;) {
        bool missing = false;
        for (u32 k = 0; k < MORE; k++) {
            seen[k] = kSumKnown;
            if (distance + 32 * k > turn.block) continue;
            seen[k] = progress[-(long long)(distance + 32 * k)];
            // Neither state bit, or another epoch.
            missing |= seen[k] >> 62 == 0 || ((seen[k] ^ none) << 2) >> (kWordBits + 2) != 0;
        }
        if (!any(missing)) return;
        let_others_run();
    }
}

// The words before the block, once those of all blocks before are announced. Looks back at 32 blocks, then at 128 at once.
DEVICE u64 await_place(const Args& a, const Turn& turn, u32 words) {
    if (turn.block == 0) return 0;
    u64 before = 0;
    u32 back = 1;
    for (bool found = false; !found;) {
        constexpr u32 kMore = 4;
        u64 seen[kMore];
        u32 looked = back == 1 ? 1 : kMore;
        if (back == 1) await_announcements<1>(a, turn, back + lane_id(), seen);
        else await_announcements<kMore>(a, turn, back + lane_id(), seen);
#pragma unroll
        for (u32 k = 0; k < kMore; k++) {
            if (k >= looked || found) continue;
            u32 sums = __ballot_sync(kAll, seen[k] >> 62 == 2);
            u32 last = sums ? (u32)__ffs((int)sums) - 1 : 31;
            // 32 blocks have fewer than 2^19 words; only the known sum may be longer.
            u64 known = __shfl_sync(kAll, seen[k] & ((1ull << kWordBits) - 1), (int)last);
            before += sum(lane_id() < last || !sums ? (u32)seen[k] : 0) + (sums ? known : 0);
            found = sums != 0;
        }
        back += 32 * looked;
    }
    if (lane_id() == 0)
        *pointer<volatile u64>(a.progress + 8 * (u64)turn.turn) = announcement(a, kSumKnown, before + words);
    return before;
}

// Notes the block in the index, and with the last block the size of the body. Returns where the block goes.
DEVICE u8* settle(const Args& a, const Turn& turn, u32 kind, u32 words, u64 place) {
    const Tensor& t = *turn.tensor;
    u64 at = blocks_offset(t.numel, a.book) + 4 * place;
    if (lane_id() == 0) {
        pointer<u16>(t.body + index_offset(t.numel, a.book))[turn.block] = (u16)(words | kind << 14);
        if (turn.block == blocks_of(t.numel) - 1) tell_size(a, turn.number, at + 4 * (u64)words);
    }
    return pointer<u8>(t.body) + at;
}
