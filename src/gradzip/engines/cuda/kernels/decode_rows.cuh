// The decoder's lanes: a window of the refill stream in shared memory, and what is popped row by row.

// An entry of a block's table, by the state's low 8 bits: length, flags, exponent << 23. Shifts take the low 5 bits of what
// they are given, so that an entry serves as a length.
constexpr u32 kEscaped = 1u << 8, kImpossible = 1u << 9;
constexpr u32 kWindow = 1024;  // bytes of the refill stream at hand

template <class F>
DEVICE void make_lookup(const u32* lookup, u32 base, bool single, u32* table) {
    __syncwarp();
    for (u32 v = lane_id(); v < 256; v += 32) {
        u32 found = lookup[v], symbol = found & 511, length = (found >> 9) & 15;
        u32 e = symbol + base;
        e = symbol == 0 ? 0 : (e + (e > 255)) & 255;
        u32 flags = e >> F::kExponent ? kImpossible : 0;
        if (symbol == 256) e = 0, flags = kEscaped;
        table[v] = single ? base << 23 : length | flags | e << 23;
    }
    __syncwarp();
}

struct Stream {
    const u32* block;  // its words
    u8* window;        // kWindow bytes, of which those from `low` on hold the block's bytes, by address modulo kWindow
    int lowest;        // the first byte of the stream
    int at;            // one past the next byte: the stream is read backwards
    int low;
    u32 next[4];       // what will be put into the window
    u32 state, upper = ~lower_lanes();

    __device__ __forceinline__ Stream(const u32* from, u8* room, int first, int end, u32 x)
        : block(from), window(room), lowest(first), at(end), low((end + 511) & ~511), state(x) {
        fetch(end);
        __syncwarp();
        advance_to(end);
        advance();
    }
    // Loads the half window below `low`, as far as it holds the stream.
    __device__ __forceinline__ void fetch(int end) {
        for (int k = 0; k < 4; k++) {
            int byte = low - 512 + 4 * ((int)lane_id() + 32 * k);
            next[k] = byte + 4 > lowest && byte < end ? block[byte >> 2] : 0;
        }
    }
    __device__ __forceinline__ void advance_to(int end) {
        for (u32 k = 0; k < 4; k++) ((u32*)window)[((u32)(low - 512) / 4 + lane_id() + 32 * k) % (kWindow / 4)] = next[k];
        low -= 512;
        fetch(end);
        __syncwarp();
    }
    // Sees to it that 512 bytes are at hand, or all that are left.
    __device__ __forceinline__ void advance() {
        if (at - low < 512) {
            __syncwarp();
            advance_to(low);
        }
    }
    // Drops `count` mod 32 bits of each lane and refills those that run low. A stream that runs dry gets wrong bytes from
    // the window; that it ends elsewhere shows at the end.
    __device__ __forceinline__ void pop(u32 count) {
#if defined(__CUDA_ARCH__)
        asm volatile(
            "{ .reg .pred few; .reg .b32 votes, place, byte;\n"
            "shf.r.wrap.b32 %0, %0, 0, %2;\n"
            "setp.lt.u32 few, %0, 256;\n"
            "vote.sync.ballot.b32 votes, few, 0xffffffff;\n"
            "and.b32 place, votes, %4;\n"
            "popc.b32 place, place;\n"
            "sub.u32 place, %1, place;\n"
            "and.b32 place, place, 1023;\n"
            "or.b32 place, place, %3;\n"
            "@few ld.shared.u8 byte, [place];\n"
            "@few mad.lo.u32 %0, %0, 256, byte;\n"
            "popc.b32 votes, votes;\n"
            "sub.u32 %1, %1, votes; }"
            : "+r"(state), "+r"(at)
            : "r"(count), "r"((u32)__cvta_generic_to_shared(window)), "r"(upper));
#else
        state >>= count & 31;
        bool few = state < 256;
        u32 votes = __ballot_sync(kAll, few);
        if (few) state = state << 8 | window[(u32)(at - __popc(votes & upper)) % kWindow];
        at -= __popc(votes);
#endif
    }
    // The exponents of a row in bits 23-30; other bits are not cleared. `seen` collects flags. EARLY: votes are asked for
    // before a pop that does not need them, so that none waits; where many warps share the GPU that is no gain.
    template <class F, bool EARLY>
    __device__ __forceinline__ u32 pop_exponent(const u32* table, bool here, u32& seen) {
        u32 entry = here ? table[state & 255] : 0;
        bool escapes = EARLY && any((entry & kEscaped) != 0);
        pop(entry);
        seen |= entry;
        if (EARLY ? escapes : any((entry & kEscaped) != 0)) {
            bool escaped = entry & kEscaped;
            u32 raw = state & 255;
            if (escaped) {
                entry = raw << 23;
                if (raw >> F::kExponent) seen |= kImpossible;
            }
            pop(escaped ? 8 : 0);
        }
        return entry;
    }
    // Lane parts of up to 24 bits, the lowest chunk first.
    template <bool EARLY>
    __device__ __forceinline__ u32 pop_part(int width) {
        bool two = EARLY && any(width > 8), three = EARLY && any(width > 16);
        u32 bits = pop_chunk((u32)min_int(width, 8));
        if (EARLY ? two : any(width > 8)) {
            bits |= pop_chunk((u32)max_int(0, min_int(width - 8, 8))) << 8;
            if (EARLY ? three : any(width > 16)) bits |= pop_chunk((u32)max_int(0, width - 16)) << 16;
        }
        return bits;
    }
    __device__ __forceinline__ u32 pop_chunk(u32 count) {
        u32 bits = state & ((1u << count) - 1);
        pop(count);
        return bits;
    }
    __device__ __forceinline__ bool sound() const { return state == 256 && at == lowest; }
};

// Where decoded values go: stored, or added to what is at `addend`.
template <class F, bool ADD>
struct Sink {
    typedef typename F::Bits Bits;
    Bits* out;
    const Bits* addend;

    __device__ __forceinline__ Sink(const Tensor& t, u64 start)
        : out(pointer<Bits>(t.values) + start), addend(pointer<const Bits>(t.addend) + start) {}
    __device__ __forceinline__ void put(u32 i, u32 bits) const {
        out[i] = (Bits)(ADD ? Sum<F>::of(addend[i], bits) : bits);
    }
    __device__ __forceinline__ bool aligned() const {
        return can_load_four<F>(out) && (!ADD || can_load_four<F>(addend));
    }
    __device__ __forceinline__ Four added(u32 i, Four four, bool together) const {
        if (ADD) {
            Four there = load_four<F>(addend, i, together);
            for (int k = 0; k < 4; k++) four.v[k] = Sum<F>::of(there.v[k], four.v[k]);
        }
        return four;
    }
    __device__ __forceinline__ void put_four(u32 i, Four four, bool together) const {
        store_four<F>(out, i, added(i, four, together), together);
    }
};

// --- Coding 0 ------------------------------------------------------------------------------------------------------

// A full block whose values all have fields of WHOLE bytes. Returns whether an exponent was 0.
template <class F, bool ADD, int WHOLE>
DEVICE bool plain_rows(Stream& s, const u32* table, u32* room, const Sink<F, ADD>& sink, u32& seen) {
    const u32* planes = s.block + 17;
    bool aligned = sink.aligned();
    u32 lane = lane_id(), zeros = 0, plane[WHOLE], next[WHOLE];
    for (u32 j = 0; j < WHOLE; j++) next[j] = planes[1024 * j + lane];
#pragma unroll 1
    for (u32 g = 0; g < 32; g++) {
        for (u32 j = 0; j < WHOLE; j++) plane[j] = next[j];
        u32 after = min_u32(g + 1, 31) * 32 + lane;
        for (u32 j = 0; j < WHOLE; j++) next[j] = planes[1024 * j + after];
        u32* exponents = room + 32 * (g & 1);
        s.advance();
        for (u32 row = 0; row < 4; row++)
            ((u8*)exponents)[32 * row + lane] = (u8)(s.template pop_exponent<F, false>(table, true, seen) >> 23);
        __syncwarp();
        u32 four = exponents[lane];
        zeros |= (four - 0x01010101u) & ~four & 0x80808080u;
        Four value;
        for (int k = 0; k < 4; k++) {
            u32 field = 0;
            for (u32 j = 0; j < WHOLE; j++) field |= ((plane[j] >> 8 * k) & 255) << 8 * j;
            value.v[k] = join<F>((four >> 8 * k) & 255, field << (F::kField - 8 * WHOLE));
        }
        sink.put_four(128 * g + 4 * lane, value, aligned);
    }
    return any(zeros != 0);
}

// Any block, row by row. Returns the number of fields.
template <class F, bool ADD>
DEVICE u32 fixed_rows(Stream& s, const u32* table, const Sink<F, ADD>& sink, int n, const DenseHead& h, u32& seen) {
    const u8* planes = (const u8*)s.block + 68;
    u32 before = 0, lower = lower_lanes(), down = (u32)F::kField - 8 * h.whole - h.rest;
    for (int row = 0; row < n; row += 32) {
        u32 i = (u32)row + lane_id();
        bool here = i < (u32)n;
        if (row % 128 == 0) s.advance();
        u32 e = (s.template pop_exponent<F, false>(table, here, seen) >> 23) & 255;
        bool has_field = here && (!h.pruned || e != 0);
        u32 kept = 0;
        if (h.rest) {
            u32 count = has_field ? h.rest : 0;
            kept = s.state & ((1u << count) - 1);
            s.pop(count);
        }
        u32 votes = __ballot_sync(kAll, has_field), place = before + (u32)__popc(votes & lower);
        if (has_field && place < h.fields)
            for (u32 j = 0; j < h.whole; j++) kept |= (u32)planes[j * h.fields + place] << (h.rest + 8 * j);
        if (here) sink.put(i, join<F>(e, kept << down));
        before += (u32)__popc(votes);
    }
    return before;
}

// --- Codings 1 and 2 -----------------------------------------------------------------------------------------------

// A row's values.
template <int CODING, bool EARLY>
DEVICE u32 lane_row(Stream& s, const u32* table, bool here, int floor, u32& fields, u32& seen) {
    u32 entry = s.template pop_exponent<Float32, EARLY>(table, here, seen);
    int e = (int)((entry >> 23) & 255), cut = 0;
    if (CODING == kPaper) {
        cut = e ? 6 * (int)(s.state & 3) : 0;
        s.pop(e ? 2 : 0);
    } else {
        cut = 23 - kept_bits(e, floor);
    }
    int width = e ? 24 - cut : 0;
    fields += width > 0;
    u32 field = s.template pop_part<EARLY>(width) << cut;
    return (entry & 0x7f800000u) | (field & 0x7fffffu) | ((field << 8) & 0x80000000u);
}

// Returns how many values are not 0.
template <int CODING, int FLOOR, bool ADD>
DEVICE u32 lane_rows(const Source<Float32, FLOOR>& source, Stream& s, const u32* table, const Sink<Float32, ADD>& sink, int n,
                     u32& seen) {
    u32 fields = 0, lane = lane_id();
    int grouped = n & ~127;
    FloorInput next[4];
    if (grouped)
        for (u32 k = 0; k < 4; k++) next[k] = load_floor(source, 32 * k + lane);
#pragma unroll 1
    for (int row = 0; row < grouped; row += 128) {
        FloorInput now[4];
        for (int k = 0; k < 4; k++) now[k] = next[k];
        u32 ahead = (u32)min_int(row + 128, grouped - 128) + lane;
        for (u32 k = 0; k < 4; k++) next[k] = load_floor(source, ahead + 32 * k);
        for (u32 k = 0; k < 4; k++) {
            if (k % 2 == 0) s.advance();
            sink.put((u32)row + 32 * k + lane, lane_row<CODING, false>(s, table, true, make_floor(source, now[k]), fields, seen));
        }
    }
    for (int row = grouped; row < n; row += 32) {
        u32 i = (u32)row + lane;
        bool here = i < (u32)n;
        s.advance();
        int floor = here ? floor_at(source, i) : 0;
        __syncwarp();
        u32 value = lane_row<CODING, false>(s, table, here, floor, fields, seen);
        if (here) sink.put(i, value);
    }
    return sum(fields);
}

// --- What becomes of a block's rows --------------------------------------------------------------------------------

// Values go to memory as they are decoded.
template <class F, int CODING, int FLOOR, bool ADD>
struct DirectRows {
    const Args& a;
    const Tensor& t;
    u64 start;
    int n;
    u32* room;  // 64 words of shared memory

    __device__ __forceinline__ Sink<F, ADD> sink() const { return Sink<F, ADD>(t, start); }

    // Of a dense block; returns the number of fields.
    __device__ __forceinline__ u32 dense(Stream& s, const u32* table, const DenseHead& h, u32& seen) const {
        if constexpr (CODING == kFixed) {
            bool plain = n == kBlock && h.fields == (u32)kBlock && h.rest == 0, zeros = false;
            if (plain && h.whole == 1) zeros = plain_rows<F, ADD, 1>(s, table, room, sink(), seen);
            else if (plain && h.whole == 3 && F::kItem == 4) zeros = plain_rows<F, ADD, F::kItem == 4 ? 3 : 1>(s, table, room, sink(), seen);
            else return fixed_rows<F, ADD>(s, table, sink(), n, h, seen);
            return h.pruned && zeros ? kAll : h.fields;  // a value with exponent 0 would have no field
        } else {
            return lane_rows<CODING, FLOOR, ADD>(Source<Float32, FLOOR>(a, t, start), s, table, sink(), n, seen);
        }
    }
    __device__ __forceinline__ void raw(const u32* block) const {
        for (u32 i = lane_id(); i < (u32)n; i += 32) sink().put(i, ((const typename F::Bits*)block)[i]);
    }
    __device__ __forceinline__ void zeros() const {
        for (u32 i = lane_id(); i < (u32)n; i += 32) sink().put(i, 0);
    }
};
