// Near mode with vectors of 32 bytes, in the words of vector_avx2.h (or its like). Included behind values_vector.h.

void fast_floors(const gz_floor& rule, uint64_t start, int n, int shift, int8_t* out) {
    auto small = [](int c) { return c > -8192 && c < 8192; };
    const int rows = small(rule.c0) && small(rule.c1) && small(rule.c2) && !rule.given ? n / kLanes * kLanes : 0;
    int i = 0;
    for (; i < rows; i += kLanes) {
        // Saturating arithmetic does the clamping, because kExact is the lowest int8.
        const uint64_t at = start + uint64_t(i);
        Bytes f = rule.second ? floors_by_rule(rule.theta + at, rule.second + at, rule.c0, rule.c1, rule.c2)
                              : floors_by_rule(rule.theta + at, nullptr, rule.c0, 0, 0);
        if (shift) f = select(equal(f, splat(kExact)), f, add_signed(f, splat(shift)));
        store(out + i, smaller_signed(f, splat(kCoarsest)));
    }
    if (i < n) floors(rule, start + uint64_t(i), n - i, shift, out + i);
}

inline void make_floors(const FloorSource& from, int first, int n, int8_t* out) {
    fast_floors(*from.rule, from.start + uint64_t(first), n, from.shift, out);
}

// Exponent fields of 2^(floor + 23), or 0 where values stay exact.
GZ_INLINE Bytes grids_of(const int8_t* floor) {
    const Bytes f = load(floor);
    return without(f + splat(150), equal(f, splat(kExact)));
}

// Exponents, widths and chunks of whole rows. Not inlined: it must stay between the changes of the float mode.
__attribute__((noinline)) inline Bytes split_rows(const BlockIn& in, Scratch& s, Gatherer& stats) {
    const uint32_t* x = static_cast<const uint32_t*>(in.values);
    Bytes widest = splat(0);
    for (int i = 0; i < in.n; i += kLanes) {
        const Bytes grids = grids_of(in.floor + i);
        const Planes p = near_parts(x + i, grids);
        const Bytes e = p.byte[3], zero = stats.add_exponents(e);
        const Bytes width = without(splat(24) - subtract_to_zero(grids, e), zero);
        widest = larger(widest, width);
        store(s.exponent + i, e);
        store(s.width + i, width);
        for (int c = 0; c < 3; c++) store(s.chunk[c] + i, without(p.byte[c], zero));
    }
    return widest;
}

inline Split split_near(const BlockIn& in, Scratch& s) {
    Gatherer stats;
    Bytes widest;
    {
        const FloatMode mode;
        widest = split_rows(in, s, stats);
    }
    // Infinities and NaN are rare: the plain mapping does the whole block again.
    if (any(equal(stats.highest, splat(255)))) return split_values_plain(in, s);
    const int chunks = any(subtract_to_zero(widest, splat(16))) ? 3 : any(subtract_to_zero(widest, splat(8))) ? 2 : any(widest) ? 1 : 0;
    // The mapped values themselves are not stored; mapped_values() makes them where a block needs them after all.
    return {nullptr, stats.finish(s.exponent, in.n), false, chunks};
}

inline Split split_values(const BlockIn& in, Scratch& s, uint8_t* planes) {
    if (in.coding == kPaper || in.job.dtype != GZ_FLOAT32 || in.n % kLanes) return split_values_plain(in, s);
    return in.coding == kNear ? split_near(in, s) : split_fixed(in, s, planes);
}

// The mapping alone, of whole rows.
__attribute__((noinline)) inline bool round_rows(const uint32_t* x, int n, const int8_t* floor, uint32_t* q) {
    for (int i = 0; i < n; i += kLanes) store_rounded(q + i, x + i, grids_of(floor + i));
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) largest = (q[i] & 0x7fffffffu) > largest ? q[i] & 0x7fffffffu : largest;
    return largest < 0x7f800000u;
}
inline bool round_near(const void* values, int n, const int8_t* floor, uint32_t* q) {
    const FloatMode mode;
    return n % kLanes == 0 && round_rows(static_cast<const uint32_t*>(values), n, floor, q);
}

// The exponents of the sampled rows of a block.
__attribute__((noinline)) inline void sample_rows(const BlockIn& in, uint8_t* exponent) {
    const uint32_t* x = static_cast<const uint32_t*>(in.values);
    for (int start = 0, found = 0; start < in.n; start += kSampleRows * kLanes, found += kLanes) {
        alignas(32) int8_t floor[kLanes];
        make_floors(in.floors, start, kLanes, floor);
        store(exponent + found, near_parts(x + start, grids_of(floor)).byte[3]);
    }
}
inline int sample_near(const BlockIn& in, uint8_t* exponent) {
    if (in.n != kBlock) return 0;
    const FloatMode mode;
    sample_rows(in, exponent);
    return kSampled;
}

inline bool join_lanes(const Scratch& s, int n, const Target& target) {
    if (!can_store(target, n)) return false;
    for (int i = 0; i < n; i += kLanes) {
        const Bytes part[3] = {load(s.chunk[0] + i), load(s.chunk[1] + i), load(s.chunk[2] + i)};
        store_near(target, i, part, load(s.width + i), load(s.exponent + i));
    }
    return true;
}

// Whole blocks in one pass are not done here.
inline int decode_near(const BlockData*, int, const Target*, const Ahead&, uint32_t*) { return 0; }
inline bool encode_near(const BlockIn&, uint8_t*, Scratch&, BlockOut*) { return false; }
