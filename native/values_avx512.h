// The hottest stages of values.h with AVX-512. Four vectors of 16 floats are turned into four vectors of 64 bytes
// (planes) and back; everything else happens on whole vectors in between.

// Byte j of value i is at plane[j] byte i.
inline void to_planes(const __m512i v[4], __m512i plane[4]) {
    // Bytes 0 and 1 (then 2 and 3) of 32 values: 16 of a, 16 of b for each byte.
    alignas(64) static const uint8_t low_order[64] = {
        0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112, 116, 120, 124,
        1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61, 65, 69, 73, 77, 81, 85, 89, 93, 97, 101, 105, 109, 113, 117, 121, 125};
    const __m512i low = _mm512_load_si512(low_order), high = _mm512_add_epi8(low, _mm512_set1_epi8(2));
    __m512i low_ab = _mm512_permutex2var_epi8(v[0], low, v[1]), high_ab = _mm512_permutex2var_epi8(v[0], high, v[1]);
    __m512i low_cd = _mm512_permutex2var_epi8(v[2], low, v[3]), high_cd = _mm512_permutex2var_epi8(v[2], high, v[3]);
    plane[0] = _mm512_inserti64x4(low_ab, _mm512_castsi512_si256(low_cd), 1);
    plane[1] = _mm512_shuffle_i64x2(low_ab, low_cd, 0xee);
    plane[2] = _mm512_inserti64x4(high_ab, _mm512_castsi512_si256(high_cd), 1);
    plane[3] = _mm512_shuffle_i64x2(high_ab, high_cd, 0xee);
}

inline void from_planes(const __m512i plane[4], __m512i v[4]) {
    // Unpacking works inside 128-bit lanes: deal the double words so that the results come out in order.
    const __m512i deal = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m512i p[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) p[j] = _mm512_permutexvar_epi32(deal, plane[j]);
    __m512i low01 = _mm512_unpacklo_epi8(p[0], p[1]), high01 = _mm512_unpackhi_epi8(p[0], p[1]);
    __m512i low23 = _mm512_unpacklo_epi8(p[2], p[3]), high23 = _mm512_unpackhi_epi8(p[2], p[3]);
    v[0] = _mm512_unpacklo_epi16(low01, low23);
    v[1] = _mm512_unpackhi_epi16(low01, low23);
    v[2] = _mm512_unpacklo_epi16(high01, high23);
    v[3] = _mm512_unpackhi_epi16(high01, high23);
}

inline __m512i select(__m512i mask, __m512i yes, __m512i no) { return _mm512_ternarylogic_epi32(mask, yes, no, 0xca); }

// sign|exponent|mantissa  <->  exponent in byte 3, sign and mantissa in bytes 2 to 0
inline __m512i exponent_first(__m512i u) {
    __m512i r = select(_mm512_set1_epi32(0x7fffff), u, _mm512_slli_epi32(u, 1));
    return select(_mm512_set1_epi32(0x800000), _mm512_srli_epi32(u, 8), r);
}
inline __m512i sign_first(__m512i r) {
    __m512i u = select(_mm512_set1_epi32(0x7fffff), r, _mm512_srli_epi32(r, 1));
    return select(_mm512_set1_epi32(int(0x80000000u)), _mm512_slli_epi32(r, 8), u);
}

// Statistics of a block, gathered 64 values at a time.
struct Gatherer {
    __m512i all = _mm512_setzero_si512(), odd = all, sum = all, highest = all, lowest = _mm512_set1_epi8(-1);
    uint32_t zeros = 0;

    // e: exponents; u: the values; `here` masks the values that exist.
    void add(__m512i e, const __m512i u[4], __mmask64 here) {
        all = _mm512_or_si512(all, _mm512_ternarylogic_epi32(u[0], u[1], _mm512_or_si512(u[2], u[3]), 0xfe));
        __mmask64 zero = add_exponents(e, here);
        if (zero)
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) odd = _mm512_mask_or_epi32(odd, __mmask16(zero >> (16 * k)), odd, u[k]);
    }
    __mmask64 add_exponents(__m512i e, __mmask64 here) {
        sum = _mm512_add_epi64(sum, _mm512_sad_epu8(e, _mm512_setzero_si512()));
        highest = _mm512_max_epu8(highest, e);
        lowest = _mm512_mask_min_epu8(lowest, here, lowest, e);
        __mmask64 zero = _mm512_testn_epi8_mask(e, e) & here;
        zeros += uint32_t(__builtin_popcountll(zero));
        return zero;
    }
    Stats finish(const uint8_t* exponent, int n) const {
        Stats s;
        s.all_bits = uint32_t(_mm512_reduce_or_epi32(all));
        s.odd_zeros = uint32_t(_mm512_reduce_or_epi32(odd));
        s.sum = uint32_t(_mm512_reduce_add_epi64(sum));
        s.nonzero = uint32_t(n) - zeros;
        alignas(64) uint8_t high[64], low[64];
        _mm512_store_si512(high, highest);
        _mm512_store_si512(low, lowest);
        uint8_t top = 0, bottom = 255;
        for (int i = 0; i < 64; i++) {
            top = high[i] > top ? high[i] : top;
            bottom = low[i] < bottom ? low[i] : bottom;
        }
        s.single = top == bottom;
        s.base = s.single ? top : sampled_base(exponent, n);
        return s;
    }
};

inline __mmask64 values_here(int n, int start) {
    return n - start >= 64 ? ~__mmask64(0) : (__mmask64(1) << (n - start)) - 1;
}

// 64 values, or fewer in the last group of a block, which alone needs masked loads and stores.
template <bool Whole>
inline void split_group(const uint32_t* x, __mmask64 here, uint8_t* exponent, uint8_t* const planes[3], Gatherer& stats) {
    __m512i u[4], r[4], plane[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        u[k] = Whole ? _mm512_loadu_si512(x + 16 * k) : _mm512_maskz_loadu_epi32(__mmask16(here >> (16 * k)), x + 16 * k);
        r[k] = exponent_first(u[k]);
    }
    to_planes(r, plane);
    _mm512_storeu_si512(exponent, plane[3]);
#pragma GCC unroll 3
    for (int j = 0; j < 3; j++) {
        if (Whole)
            _mm512_storeu_si512(planes[j], plane[j]);
        else
            _mm512_mask_storeu_epi8(planes[j], here, plane[j]);
    }
    stats.add(plane[3], u, here);
}

// float32: exponents, statistics and full planes in one pass. The planes are n bytes each.
inline Stats split_float32(const uint32_t* x, int n, uint8_t* exponent, uint8_t* planes) {
    Gatherer stats;
    int i = 0;
    for (; i + 64 <= n; i += 64) {
        uint8_t* const at[3] = {planes + i, planes + n + i, planes + 2 * n + i};
        split_group<true>(x + i, ~__mmask64(0), exponent + i, at, stats);
    }
    if (i < n) {
        uint8_t* const at[3] = {planes + i, planes + n + i, planes + 2 * n + i};
        split_group<false>(x + i, values_here(n, i), exponent + i, at, stats);
    }
    return stats.finish(exponent, n);
}

// Near mode: the mapping of map_value<GZ_NEAR> and the lane part of its result in one pass.
// Adding C = 2^(f+23) to |x| < C rounds |x| to a multiple of 2^f, ties to even, and leaves that multiple in the low
// bits of the sum; larger |x| are on the grid already. Right for finite x.
// Ordinary floors are -124 and above: then |x| below 2^-126 falls to zero by itself, and no value is to stay exact.
template <bool Ordinary>
inline __m512i near16(const uint32_t* x, const int8_t* floor, __m512i* width, __m512i* largest) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512i implicit = _mm512_set1_epi32(0x800000), mantissa = _mm512_set1_epi32(0x7fffff);
    __m512i u = _mm512_loadu_si512(x);
    __m512i f = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(floor)));
    __m512i magnitude = _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff));
    *largest = _mm512_max_epu32(*largest, magnitude);
    __m512i c = _mm512_slli_epi32(_mm512_add_epi32(f, _mm512_set1_epi32(150)), 23);
    __m512i sum = _mm512_castps_si512(_mm512_add_round_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(c), nearest));
    __mmask16 exact = _mm512_cmpge_epu32_mask(magnitude, c);
    __m512i multiple = _mm512_sub_epi32(sum, c);  // from its leading one down
    if (!Ordinary) {
        exact |= _mm512_cmpeq_epi32_mask(f, _mm512_set1_epi32(kExact));
        __mmask16 normal = _mm512_cmpge_epu32_mask(magnitude, implicit);
        exact &= normal;
        multiple = _mm512_maskz_mov_epi32(normal, multiple);
    }
    multiple = _mm512_mask_or_epi32(multiple, exact, _mm512_and_si512(magnitude, mantissa), implicit);
    __m512i zeros = _mm512_lzcnt_epi32(multiple);
    __m512i kept = _mm512_sub_epi32(_mm512_set1_epi32(31), zeros);  // -1 for zeros
    __m512i e = _mm512_add_epi32(_mm512_sub_epi32(_mm512_set1_epi32(158), zeros), f);  // f + 127 + kept
    e = _mm512_mask_srli_epi32(e, exact, magnitude, 23);
    // The lane part has the sign where the multiple has its leading one. For zeros that shift is out of range: no bit.
    __m512i leading = _mm512_maskz_sllv_epi32(__mmask16(~_mm512_movepi32_mask(u)), _mm512_set1_epi32(1), kept);
    *width = _mm512_sub_epi32(_mm512_set1_epi32(32), zeros);
    __m512i top = _mm512_maskz_slli_epi32(_mm512_test_epi32_mask(multiple, multiple), e, 24);
    return _mm512_ternarylogic_epi32(multiple, leading, top, 0xbe);  // (multiple ^ leading) | top
}

template <bool Ordinary>
inline Split split_near(const BlockIn& in, Scratch& s) {
    Gatherer stats;
    __m512i widest = _mm512_setzero_si512(), largest = widest;
    for (int i = 0; i < in.n; i += 64) {
        const uint32_t* x = static_cast<const uint32_t*>(in.values) + i;
        const int8_t* floor = in.floor + i;
        __mmask64 here = values_here(in.n, i);
        alignas(64) uint32_t padded[64];
        int8_t padded_floor[64];
        if (__builtin_expect(here != ~__mmask64(0), 0)) {  // zeros on an ordinary grid
            std::memset(padded, 0, sizeof padded);
            std::memset(padded_floor, 0, sizeof padded_floor);
            std::memcpy(padded, x, size_t(in.n - i) * 4);
            std::memcpy(padded_floor, floor, size_t(in.n - i));
            x = padded;
            floor = padded_floor;
        }
        __m512i packed[4], plane[4], width[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) packed[k] = near16<Ordinary>(x + 16 * k, floor + 16 * k, &width[k], &largest);
        __m512i low = _mm512_max_epi32(width[0], width[1]), high = _mm512_max_epi32(width[2], width[3]);
        widest = _mm512_max_epi32(widest, _mm512_max_epi32(low, high));
        // Widths are small: two vectors fit into the halves of one, so that half as many narrowings do.
        __m512i pair0 = _mm512_packus_epi32(width[0], width[1]), pair1 = _mm512_packus_epi32(width[2], width[3]);
        const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        _mm512_storeu_si512(s.width + i, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(pair0, pair1)));
        to_planes(packed, plane);
#pragma GCC unroll 3
        for (int j = 0; j < 3; j++) _mm512_storeu_si512(s.chunk[j] + i, plane[j]);
        _mm512_storeu_si512(s.exponent + i, plane[3]);
        stats.add_exponents(plane[3], here);
    }
    // Infinities and NaN are rare: the plain mapping does the whole block again.
    if (_mm512_reduce_max_epu32(largest) >= 0x7f800000u) return split_values_plain(in, s);
    int chunks = (_mm512_reduce_max_epi32(widest) + 7) / 8;
    // The mapped values themselves are not stored; mapped_values() makes them where a block needs them after all.
    return {nullptr, stats.finish(s.exponent, in.n), false, chunks};
}

inline Split split_near(const BlockIn& in, Scratch& s) {
    __m512i finest = _mm512_set1_epi8(127);
    for (int i = 0; i < in.n; i += 64) {
        __mmask64 here = values_here(in.n, i);
        finest = _mm512_mask_min_epi8(finest, here, finest, _mm512_loadu_si512(in.floor + i));
    }
    return _mm512_cmplt_epi8_mask(finest, _mm512_set1_epi8(-124)) ? split_near<false>(in, s) : split_near<true>(in, s);
}

// The mapping alone: adding C and taking it away again leaves the multiple of the grid. `q` has room for 16 values more.
inline bool round_near(const void* values, int n, const int8_t* floor, uint32_t* q) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const uint32_t* x = static_cast<const uint32_t*>(values);
    const __m512i sign_bit = _mm512_set1_epi32(int(0x80000000u));
    __m512i largest = _mm512_setzero_si512();
    for (int i = 0; i < n; i += 16) {
        const __mmask16 here = n - i >= 16 ? __mmask16(~0) : __mmask16((1 << (n - i)) - 1);
        const __m512i u = _mm512_maskz_loadu_epi32(here, x + i);
        const __m512i f = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(here, floor + i));
        const __m512i magnitude = _mm512_andnot_si512(sign_bit, u);
        largest = _mm512_max_epu32(largest, magnitude);
        const __m512i c = _mm512_slli_epi32(_mm512_add_epi32(f, _mm512_set1_epi32(150)), 23);
        const __m512 grid = _mm512_castsi512_ps(c);
        const __m512 sum = _mm512_add_round_ps(_mm512_castsi512_ps(magnitude), grid, nearest);
        const __mmask16 exact =
            _mm512_cmpge_epu32_mask(magnitude, c) | _mm512_cmpeq_epi32_mask(f, _mm512_set1_epi32(kExact));
        __m512i rounded = _mm512_castps_si512(_mm512_sub_round_ps(sum, grid, nearest));
        rounded = _mm512_mask_mov_epi32(rounded, exact, magnitude);
        rounded = _mm512_maskz_mov_epi32(_mm512_cmpge_epu32_mask(magnitude, _mm512_set1_epi32(0x800000)), rounded);
        const __mmask16 nonzero = _mm512_test_epi32_mask(rounded, rounded);
        _mm512_storeu_si512(q + i, _mm512_mask_or_epi32(rounded, nonzero, rounded, _mm512_and_si512(u, sign_bit)));
    }
    return _mm512_reduce_max_epu32(largest) < 0x7f800000u;
}

inline Split split_values(const BlockIn& in, Scratch& s, uint8_t* planes) {
    if (in.coding == kNear) return split_near(in, s);
    if (in.coding == kPaper || in.job.dtype != GZ_FLOAT32) return split_values_plain(in, s);
    const uint32_t* values = static_cast<const uint32_t*>(in.values);
    if (in.job.mode != GZ_LOSSLESS) {
        map_values(values, in.n, in.job, nullptr, s.mapped);
        values = s.mapped;
    }
    return {values, split_float32(values, in.n, s.exponent, planes), true, -1};
}

inline void store_floats(const Target& target, int i, __m512i v) {
    float* to = static_cast<float*>(target.out) + i;
    if (target.add) {
        const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(to), _mm512_castsi512_ps(v));
        const __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
        _mm512_storeu_si512(to, _mm512_mask_mov_epi32(_mm512_castps_si512(sum), nan, _mm512_set1_epi32(int(kNaN))));
    } else if (target.stream)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), v);
    else
        _mm512_storeu_si512(to, v);
}

inline bool can_store(const Target& target, int n) {
    return n % 64 == 0 && !(target.stream && (reinterpret_cast<uintptr_t>(target.out) & 63));
}

template <int Whole>
inline void join_planes(const uint8_t* exponent, const uint8_t* const planes[3], int n, const Target& target) {
    for (int i = 0; i < n; i += 64) {
        __m512i plane[4], v[4];
#pragma GCC unroll 3
        for (int j = 0; j < 3; j++)
            plane[j] = j < 3 - Whole ? _mm512_setzero_si512() : _mm512_loadu_si512(planes[j < 3 - Whole ? 0 : j - 3 + Whole] + i);
        plane[3] = _mm512_loadu_si512(exponent + i);
        from_planes(plane, v);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) store_floats(target, i + 16 * k, sign_first(v[k]));
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

inline bool join_lanes(const Scratch& s, int n, const Target& target) {
    if (!can_store(target, n)) return false;
    for (int i = 0; i < n; i += 64) {
        __m512i plane[4], v[4];
#pragma GCC unroll 3
        for (int j = 0; j < 3; j++) plane[j] = _mm512_loadu_si512(s.chunk[j] + i);
        plane[3] = _mm512_loadu_si512(s.exponent + i);
        from_planes(plane, v);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            // Shifted up to the width of a whole field, the sign comes to lie in bit 23; sllv drops what is beyond.
            __m512i width = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s.width + i + 16 * k)));
            __m512i field = _mm512_sllv_epi32(v[k], _mm512_sub_epi32(_mm512_set1_epi32(24), width));
            store_floats(target, i + 16 * k, sign_first(select(_mm512_set1_epi32(0xffffff), field, v[k])));
        }
    }
    return true;
}

// The rule of `floors` in values.h: saturating arithmetic does its clamping, because kExact is the lowest int8.
void fast_floors(const gz_floor& rule, uint64_t start, int n, int shift, int8_t* out) {
    if (rule.given) return floors(rule, start, n, shift, out);
    const __m512i c0 = _mm512_set1_epi32(rule.c0), c1 = _mm512_set1_epi32(rule.c1), c2 = _mm512_set1_epi32(rule.c2);
    const __m512i low_byte = _mm512_set1_epi32(255), exact = _mm512_set1_epi32(kExact);
    const __m128i exact_bytes = _mm_set1_epi8(char(kExact)), shifts = _mm_set1_epi8(char(shift));
    const __m128i coarsest = _mm_set1_epi8(kCoarsest);
    for (int i = 0; i < n; i += 16) {
        __mmask16 here = n - i >= 16 ? __mmask16(~0) : __mmask16((1 << (n - i)) - 1);
        auto exponents = [&](const float* from) {
            __m512i bits = here == __mmask16(~0) ? _mm512_loadu_si512(from + start + uint64_t(i))
                                                 : _mm512_maskz_loadu_epi32(here, from + start + uint64_t(i));
            return _mm512_and_si512(_mm512_srli_epi32(bits, 23), low_byte);
        };
        __m512i theta = exponents(rule.theta), f = _mm512_add_epi32(theta, c0);
        if (rule.second)
            f = _mm512_add_epi32(f, _mm512_srai_epi32(_mm512_max_epi32(_mm512_add_epi32(exponents(rule.second), c1), c2), 1));
        f = _mm512_mask_mov_epi32(f, _mm512_testn_epi32_mask(theta, theta), exact);
        __m128i bytes = _mm512_cvtsepi32_epi8(f);
        if (shift) bytes = _mm_mask_adds_epi8(bytes, _mm_cmpneq_epi8_mask(bytes, exact_bytes), bytes, shifts);
        bytes = _mm_min_epi8(bytes, coarsest);
        if (here == __mmask16(~0))
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), bytes);
        else
            _mm_mask_storeu_epi8(out + i, here, bytes);
    }
}

inline void make_floors(const FloorSource& from, int first, int n, int8_t* out) {
    fast_floors(*from.rule, from.start + uint64_t(first), n, from.shift, out);
}
