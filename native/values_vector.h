// The hottest stages of values.h and block.h with vectors of 32 bytes, in the words of vector_avx2.h (or its like).
// Included behind values.h.

// `to` may be `from` or lie before it: a store never reaches beyond what has been read.
inline void compress_bytes(const uint8_t* from, const uint8_t* exponent, int n, uint8_t* to) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) to = compress(to, load(from + i), equal(load(exponent + i), splat(0)) ^ splat(255));
    for (; i < n; i++) {
        *to = from[i];
        to += exponent[i] != 0;
    }
}

inline void expand_bytes(const uint8_t* from, int count, const uint8_t* exponent, int n, uint8_t* to) {
    const uint8_t* end = from + count;  // loads may run over it: it lies in a block
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const Bytes there = equal(load(exponent + i), splat(0)) ^ splat(255);
        store(to + i, expand(from, there));
        from += count_of(there);
    }
    for (; i < n; i++) {
        to[i] = exponent[i] && from < end ? *from : 0;
        from += exponent[i] != 0;
    }
}

// Statistics of a block, gathered 32 values at a time.
struct Gatherer {
    Bytes all[3] = {splat(0), splat(0), splat(0)}, odd = splat(0), highest = splat(0), lowest = splat(255);
    uint32_t nonzero = 0;

    GZ_INLINE Bytes add_exponents(Bytes e) {
        highest = larger(highest, e);
        lowest = smaller(lowest, e);
        const Bytes zero = equal(e, splat(0));
        nonzero += uint32_t(kLanes - count_of(zero));
        return zero;
    }
    // Exponents, and the three bytes of fields.
    GZ_INLINE void add(Bytes e, const Bytes field[3]) {
        const Bytes zero = add_exponents(e);
        for (int j = 0; j < 3; j++) all[j] = all[j] | field[j];
        odd = odd | ((field[0] | field[1] | field[2]) & zero);
    }
    static uint32_t any_of(Bytes bytes) {
        uint8_t byte[kLanes];
        store(byte, bytes);
        uint32_t result = 0;
        for (uint8_t b : byte) result |= b;
        return result;
    }
    static bool equals(Bytes a, Bytes b) { return !any(a ^ b); }
    Stats finish(const uint8_t* exponent, int n) const {
        Stats s;
        const uint32_t top = any_of(all[2]);
        s.all_bits = any_of(all[0]) | any_of(all[1]) << 8 | (top & 0x7f) << 16 | (top & 0x80) << 24;
        s.odd_zeros = any_of(odd);
        s.nonzero = nonzero;
        uint8_t high[kLanes], low[kLanes], upper = 0, lower = 255;
        store(high, highest);
        store(low, lowest);
        for (int i = 0; i < kLanes; i++) {
            upper = high[i] > upper ? high[i] : upper;
            lower = low[i] < lower ? low[i] : lower;
        }
        s.single = upper == lower;
        s.base = s.single ? upper : sampled_base(exponent, n);
        return s;
    }
};

// Bytes of floats  <->  exponents, and fields in three bytes
GZ_INLINE Bytes take_exponents(Planes& p) {
    const Bytes b2 = p.byte[2], b3 = p.byte[3];
    p.byte[2] = (b2 & splat(0x7f)) | (b3 & splat(0x80));
    return b3 + b3 - top_bits(b2);
}
GZ_INLINE void put_exponents(Planes& p, Bytes e) {
    const Bytes field = p.byte[2];
    const Bytes odd = equal(e & splat(1), splat(1));
    p.byte[2] = (field & splat(0x7f)) | (odd & splat(0x80));
    p.byte[3] = (field & splat(0x80)) | halves(e);
}

// float32: exponents, statistics and full planes in one pass. Whole rows only; the planes are n bytes each.
inline Stats split_float32(const uint32_t* x, int n, uint8_t* exponent, uint8_t* planes) {
    Gatherer stats;
    for (int i = 0; i < n; i += kLanes) {
        Planes p = load_planes(x + i);
        const Bytes e = take_exponents(p);
        store(exponent + i, e);
        for (int j = 0; j < 3; j++) store(planes + j * n + i, p.byte[j]);
        stats.add(e, p.byte);
    }
    return stats.finish(exponent, n);
}

// Lossless and keep=k, of whole rows.
inline Split split_fixed(const BlockIn& in, Scratch& s, uint8_t* planes) {
    const uint32_t* values = static_cast<const uint32_t*>(in.values);
    if (in.job.mode != GZ_LOSSLESS) {
        map_values(values, in.n, in.job, nullptr, s.mapped);
        values = s.mapped;
    }
    return {values, split_float32(values, in.n, s.exponent, planes), true, -1};
}

inline bool can_store(const Target& target, int n) {
    return n % kLanes == 0 && !(target.stream && (reinterpret_cast<uintptr_t>(target.out) & (kStreamAlignment - 1)));
}

template <int Whole>
inline void join_planes(const uint8_t* exponent, const uint8_t* const planes[3], int n, const Target& target) {
    for (int i = 0; i < n; i += kLanes) {
        Planes p{{splat(0), splat(0), splat(0), splat(0)}};
        for (int j = 0; j < Whole; j++) p.byte[3 - Whole + j] = load(planes[j] + i);
        put_exponents(p, load(exponent + i));
        store_planes(target, i, p);
    }
}

// Fields of whole bytes.
inline bool join_bytes(const uint8_t* exponent, const uint8_t* const planes[3], int n, int whole, const Target& target) {
    if (!can_store(target, n)) return false;
    if (whole == 3)
        join_planes<3>(exponent, planes, n, target);
    else if (whole == 2)
        join_planes<2>(exponent, planes, n, target);
    else if (whole == 1)
        join_planes<1>(exponent, planes, n, target);
    else
        join_planes<0>(exponent, planes, n, target);
    return true;
}
