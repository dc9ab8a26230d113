// Values in and out: what each mode maps a value to, how values split into exponents, fields and lane bits, and back.
// Plain loops, so that the compiler vectorises them for the instruction set at hand; values_avx512.h has faster
// forms of the hottest ones. Included once per instruction set, inside a namespace (see block_scalar.cpp).

#define GZ_RESTRICT __restrict__

// --- What each mode maps a value to ---

inline uint32_t paper_level(uint32_t exponent, int reach) {
    int span = reach - (int(exponent) - 127) - 1;
    uint32_t level = span >= 18 ? 3 : span >= 12 ? 2 : span >= 6 ? 1 : 0;
    level = reach == kExact ? 0 : level;
    return exponent == 255 ? 0 : level;
}

// q(x) for one value; Mode is a constant, so each loop below has only its own branches.
template <int Mode>
inline uint32_t map_value(uint32_t u, int floor, int keep) {
    uint32_t sign = u & 0x80000000u, magnitude = u & 0x7fffffffu, exponent = magnitude >> 23;
    int kept = keep;
    if (Mode == GZ_NEAR) {
        kept = int(exponent) - 127 - floor;
        kept = kept > 23 ? 23 : kept;
        kept = floor == kExact ? 23 : kept;  // one condition at a time, or the loops do not vectorise
    } else if (Mode == GZ_PAPER) {
        kept = 23 - 6 * int(paper_level(exponent, floor));
    }
    int bounded = kept < 0 ? 0 : kept;
    uint32_t cut = uint32_t(23 - bounded), mask = ~0u << cut, truncated = magnitude & mask, result = truncated;
    if (Mode == GZ_NEAR || Mode == GZ_KEEP) {
        // Ties to even multiples of the grid; with no bit kept the multiple is the implicit 1, which is odd.
        uint32_t odd = cut == 23 ? 1 : magnitude >> cut & 1;
        uint32_t half = (1u << cut) >> 1;
        uint32_t rounded = (magnitude + (cut ? half - 1 + odd : 0)) & mask;
        if (Mode == GZ_KEEP) {
            result = rounded < 0x7f800000u ? rounded : truncated;
        } else {
            // Below the grid: more than half a step rounds up to one step, the rest to zero.
            uint32_t one_step = uint32_t(floor + 127) << 23;
            uint32_t below = magnitude & 0x7fffff ? one_step : 0;
            below = kept == -1 ? below : 0;
            result = kept < 0 ? below : rounded;
        }
    }
    result = exponent == 0 ? 0 : result;
    result = exponent == 255 ? (magnitude > 0x7f800000u ? 0x7fc00000u : 0x7f800000u) : result;
    return result ? result | sign : 0;
}

constexpr int kCut = -1;  // the Mode of map_value that truncates to `keep` bits

// keep=k for finite values that stay finite: fewer steps than map_value needs. False if there are others.
inline bool keep_finite(const void* GZ_RESTRICT x, int n, const gz_job& job, uint32_t* GZ_RESTRICT q) {
    const int cut = 23 - job.keep;
    const bool rounds = cut && !job.truncate;
    const uint32_t mask = ~0u << cut, half = rounds ? 1u << (cut - 1) : 0;
    // Ties to even; with no bit kept to the larger magnitude.
    const uint32_t add = half && cut < 23 ? half - 1 : half, odd = half && cut < 23;
    int32_t largest = 0;
    for (int i = 0; i < n; i++) {
        const uint32_t u = value_at<uint32_t>(x, i), magnitude = u & 0x7fffffffu;
        largest = int32_t(magnitude) > largest ? int32_t(magnitude) : largest;
        const uint32_t normal = 0u - uint32_t(int32_t(magnitude) >= 0x800000);  // a mask, so that the loop vectorises
        q[i] = (((magnitude + add + (magnitude >> cut & odd)) & mask) | (u & 0x80000000u)) & normal;
    }
    return uint32_t(largest) + half < 0x7f800000u;
}

inline void map_values(const void* GZ_RESTRICT x, int n, const gz_job& job, const int8_t* GZ_RESTRICT floor,
                       uint32_t* GZ_RESTRICT q) {
    int keep = job.keep;
    if (job.mode == GZ_KEEP && keep_finite(x, n, job, q)) return;
    if (job.mode == GZ_KEEP && job.truncate)
        for (int i = 0; i < n; i++) q[i] = map_value<kCut>(value_at<uint32_t>(x, i), 0, keep);
    else if (job.mode == GZ_KEEP)
        for (int i = 0; i < n; i++) q[i] = map_value<GZ_KEEP>(value_at<uint32_t>(x, i), 0, keep);
    else if (job.mode == GZ_NEAR)
        for (int i = 0; i < n; i++) q[i] = map_value<GZ_NEAR>(value_at<uint32_t>(x, i), floor[i], 23);
    else
        for (int i = 0; i < n; i++) q[i] = map_value<GZ_PAPER>(value_at<uint32_t>(x, i), floor[i], 23);
}

// --- Exponents and their statistics ---

struct Stats {
    uint32_t all_bits = 0;      // or of all values
    uint32_t odd_zeros = 0;     // or of the values with exponent 0
    uint32_t sum = 0, nonzero = 0;  // of the exponents
    bool single = false;
    int base = 0;
};

inline int rounded_mean(uint32_t sum, uint32_t count) { return count ? int((sum + count / 2) / count) : 0; }


// The rounded mean of the non-zero exponents in rows 0, 16, 32, ...
inline int sampled_base(const uint8_t* exponent, int n) {
    uint32_t sum = 0, nonzero = 0;
    for (int start = 0; start < n; start += kSampleRows * kLanes) {
        const int here = n - start < kLanes ? n - start : kLanes;
        for (int i = 0; i < here; i++) {
            sum += exponent[start + i];
            nonzero += exponent[start + i] != 0;
        }
    }
    return rounded_mean(sum, nonzero);
}

// A block after mapping: where its values are, their statistics, and what has been made on the way.
struct Split {
    const void* values;  // NULL: not stored; mapped_values() makes them
    Stats stats;
    bool full_planes;  // the three bytes of every field are already in the planes
    int chunks;        // the lane part is already split into so many chunks; -1: it is not
};

template <typename Word, int MantissaBits>
Stats split_exponents(const void* GZ_RESTRICT v, int n, uint8_t* GZ_RESTRICT exponent) {
    constexpr uint32_t mask = MantissaBits == 10 ? 31 : 255;
    uint32_t all = 0, odd = 0;
    for (int i = 0; i < n; i++) {
        uint32_t u = value_at<Word>(v, i), e = u >> MantissaBits & mask;
        exponent[i] = uint8_t(e);
        all |= u;
        odd |= e ? 0 : u;
    }
    uint32_t sum = 0, nonzero = 0;
    uint8_t lowest = 255, highest = 0;
    for (int i = 0; i < n; i++) {
        uint8_t e = exponent[i];
        sum += e;
        nonzero += e != 0;
        lowest = e < lowest ? e : lowest;
        highest = e > highest ? e : highest;
    }
    Stats s;
    s.all_bits = all;
    s.odd_zeros = odd;
    s.sum = sum;
    s.nonzero = nonzero;
    s.single = lowest == highest;
    s.base = s.single ? highest : sampled_base(exponent, n);
    return s;
}

inline Stats split_exponents(const void* values, int n, int dtype, uint8_t* exponent) {
    if (dtype == GZ_FLOAT32) return split_exponents<uint32_t, 23>(values, n, exponent);
    return dtype == GZ_BFLOAT16 ? split_exponents<uint16_t, 7>(values, n, exponent)
                                : split_exponents<uint16_t, 10>(values, n, exponent);
}

// Maps the values of a block and finds their exponents.
inline Split split_values_plain(const BlockIn& in, Scratch& scratch) {
    const void* values = in.values;
    if (in.job.dtype == GZ_FLOAT32 && in.job.mode != GZ_LOSSLESS) {
        map_values(values, in.n, in.job, in.floor, scratch.mapped);
        values = scratch.mapped;
    }
    return {values, split_exponents(values, in.n, in.job.dtype, scratch.exponent), false, -1};
}

inline const void* mapped_values(const BlockIn& in, const Split& split, Scratch& scratch) {
    if (split.values) return split.values;
    map_values(in.values, in.n, in.job, in.floor, scratch.mapped);
    return scratch.mapped;
}

// --- Fields: byte planes, and the bits that remain ---

// t = field >> (F - w): its low `rest` bits go to `lane`, whole bytes above to planes[0..whole).
template <typename Word, int FieldBits>
void split_fields(const void* GZ_RESTRICT v, int n, int width, uint8_t* const planes[3], uint8_t* GZ_RESTRICT lane) {
    constexpr int sign_at = 8 * sizeof(Word) - 1;
    constexpr uint32_t mantissa = (1u << (FieldBits - 1)) - 1;
    const int whole = width / 8, rest = width % 8, drop = FieldBits - width;
    auto kept = [=](uint32_t u) { return ((u & mantissa) | (u >> sign_at & 1) << (FieldBits - 1)) >> drop; };
    for (int j = 0; j < whole; j++) {
        uint8_t* GZ_RESTRICT plane = planes[j];
        const int shift = rest + 8 * j;
        for (int i = 0; i < n; i++) plane[i] = uint8_t(kept(value_at<Word>(v, i)) >> shift);
    }
    if (rest)
        for (int i = 0; i < n; i++) lane[i] = uint8_t(kept(value_at<Word>(v, i)) & ((1u << rest) - 1));
}

inline void split_fields(const void* values, int n, int dtype, int width, uint8_t* const planes[3], uint8_t* lane) {
    if (dtype == GZ_FLOAT32)
        split_fields<uint32_t, 24>(values, n, width, planes, lane);
    else if (dtype == GZ_BFLOAT16)
        split_fields<uint16_t, 8>(values, n, width, planes, lane);
    else
        split_fields<uint16_t, 11>(values, n, width, planes, lane);
}

template <typename Word, int FieldBits>
void join_fields(const uint8_t* GZ_RESTRICT exponent, const uint8_t* const planes[3], const uint8_t* GZ_RESTRICT lane,
                 int n, int width, Word* GZ_RESTRICT v) {
    constexpr int sign_at = 8 * sizeof(Word) - 1;
    constexpr uint32_t mantissa = (1u << (FieldBits - 1)) - 1;
    const int whole = width / 8, rest = width % 8, drop = FieldBits - width;
    const uint8_t *GZ_RESTRICT p0 = planes[0], *GZ_RESTRICT p1 = planes[1], *GZ_RESTRICT p2 = planes[2];
    auto word = [](uint32_t e, uint32_t field) {
        return Word(e << (FieldBits - 1) | (field & mantissa) | (field >> (FieldBits - 1)) << sign_at);
    };
    if (rest == 0) {
        if (whole == 0)
            for (int i = 0; i < n; i++) v[i] = word(exponent[i], 0);
        else if (whole == 1)
            for (int i = 0; i < n; i++) v[i] = word(exponent[i], uint32_t(p0[i]) << drop);
        else if (whole == 2)
            for (int i = 0; i < n; i++) v[i] = word(exponent[i], (p0[i] | uint32_t(p1[i]) << 8) << drop);
        else
            for (int i = 0; i < n; i++) v[i] = word(exponent[i], p0[i] | uint32_t(p1[i]) << 8 | uint32_t(p2[i]) << 16);
        return;
    }
    for (int i = 0; i < n; i++) {
        uint32_t t = lane[i];
        if (whole > 0) t |= uint32_t(p0[i]) << rest;
        if (whole > 1) t |= uint32_t(p1[i]) << (rest + 8);
        v[i] = word(exponent[i], t << drop);
    }
}

// --- The lane part of near and paper mode ---

// The lane part of near and paper mode: its bits, and their number.
template <bool Near>
void lane_part(const uint32_t* GZ_RESTRICT q, int n, const int8_t* GZ_RESTRICT floor, uint32_t* GZ_RESTRICT part,
               uint32_t* GZ_RESTRICT width) {
    for (int i = 0; i < n; i++) {
        uint32_t u = q[i], e = u >> 23 & 255;
        int kept = int(e) - 127 - floor[i];
        if (Near) {
            kept = kept < 0 ? 0 : kept;
            kept = kept > 23 ? 23 : kept;
            kept = floor[i] == kExact ? 23 : kept;
            kept = e == 255 ? 23 : kept;
        } else {
            kept = 23 - 6 * int(paper_level(e, floor[i]));
        }
        uint32_t bits = (u >> 31) << kept | (u & 0x7fffff) >> (23 - kept);
        part[i] = e ? bits : 0;
        width[i] = e ? uint32_t(kept) + 1 : 0;
    }
}

inline void narrow(const uint32_t* GZ_RESTRICT from, int n, int shift, uint8_t* GZ_RESTRICT to) {
    for (int i = 0; i < n; i++) to[i] = uint8_t(from[i] >> shift);
}

inline void paper_levels(const uint32_t* GZ_RESTRICT q, int n, const int8_t* GZ_RESTRICT floor, uint32_t* GZ_RESTRICT level) {
    for (int i = 0; i < n; i++) level[i] = paper_level(q[i] >> 23 & 255, floor[i]);
}

// Puts widths and chunks where the lanes want them; returns the highest chunk that occurs.
template <bool Near>
int split_lane_part(const uint32_t* q, int n, const int8_t* floor, Scratch& s) {
    lane_part<Near>(q, n, floor, s.part, s.wide);
    uint32_t widest = 0;
    for (int i = 0; i < n; i++) widest = s.wide[i] > widest ? s.wide[i] : widest;
    narrow(s.wide, n, 0, s.width);
    for (int c = 0; c < 3; c++) narrow(s.part, n, 8 * c, s.chunk[c]);
    if (!Near) {
        paper_levels(q, n, floor, s.wide);
        narrow(s.wide, n, 0, s.level);
    }
    return int(widest + 7) / 8;
}

inline void join_lane_part(const uint8_t* GZ_RESTRICT exponent, const uint8_t* GZ_RESTRICT c0, const uint8_t* GZ_RESTRICT c1,
                           const uint8_t* GZ_RESTRICT c2, const uint8_t* GZ_RESTRICT width, int n, uint32_t* GZ_RESTRICT q) {
    for (int i = 0; i < n; i++) {
        // Shifted up to the width of a whole field, the sign comes to lie in bit 23. Zeros have no bits at all.
        uint32_t bits = c0[i] | uint32_t(c1[i]) << 8 | uint32_t(c2[i]) << 16, field = bits << (24 - width[i]);
        q[i] = (field & 0x800000) << 8 | uint32_t(exponent[i]) << 23 | (field & 0x7fffff);
    }
}

// --- Output ---

constexpr uint32_t kNaN = 0x7fc00000;  // of every sum: which operand's payload survives is up to the compiler

inline void add_floats(const void* GZ_RESTRICT from, int n, void* GZ_RESTRICT to) {
    for (int i = 0; i < n; i++) {
        const float sum = value_at<float>(to, i) + value_at<float>(from, i);
        uint32_t bits;
        std::memcpy(&bits, &sum, 4);
        const uint32_t nan = 0u - uint32_t(sum != sum);  // a mask, so that the loop vectorises without blends, too
        put_value(to, i, (bits & ~nan) | (kNaN & nan));
    }
}

// 16-bit sums: through float and back, rounding to nearest even as torch does.
inline float half_to_float(uint16_t h, int dtype) {
    uint32_t bits;
    if (dtype == GZ_BFLOAT16) {
        bits = uint32_t(h) << 16;
    } else {
        uint32_t sign = uint32_t(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
        if (e == 31) {
            bits = sign | 0x7f800000u | m << 13;
        } else if (e) {
            bits = sign | (e + 112) << 23 | m << 13;
        } else {
            float tiny = float(m) * (1.0f / 16777216.0f);
            std::memcpy(&bits, &tiny, 4);
            bits |= sign;
        }
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline uint16_t float_to_half(float f, int dtype) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    if (dtype == GZ_BFLOAT16) {
        if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
        return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    uint32_t sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7e00;
    if (magnitude >= 0x47800000u) return uint16_t(sign | 0x7c00);  // 65536 and above
    if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 puts the bits where they belong, rounded
        float shifted;
        std::memcpy(&shifted, &magnitude, 4);
        shifted += 0.5f;
        uint32_t bits;
        std::memcpy(&bits, &shifted, 4);
        return uint16_t(sign | (bits - 0x3f000000u));
    }
    return uint16_t(sign | (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

inline void deliver(const void* values, int n, int dtype, const Target& target) {
    if (!target.add) {
        copy_out(target.out, values, size_t(n) * size_t(float_layout(dtype).item_bytes), target.stream);
    } else if (dtype == GZ_FLOAT32) {
        add_floats(values, n, target.out);
    } else {
        for (int i = 0; i < n; i++) {
            float sum = half_to_float(value_at<uint16_t>(target.out, i), dtype) + half_to_float(value_at<uint16_t>(values, i), dtype);
            put_value(target.out, i, float_to_half(sum, dtype));
        }
    }
}

// --- Floors ---

void floors(const gz_floor& rule, uint64_t start, int n, int shift, int8_t* GZ_RESTRICT out) {
    if (rule.given) {
        const int8_t* GZ_RESTRICT given = rule.given + start;
        for (int i = 0; i < n; i++) {
            int f = given[i] + shift;
            out[i] = int8_t(given[i] == kExact ? kExact : f > kCoarsest ? kCoarsest : f);
        }
        return;
    }
    const int c0 = rule.c0, c1 = rule.c1, c2 = rule.c2;
    auto finish = [=](int theta, int f) {
        int shifted = f + shift;
        shifted = shifted > kCoarsest ? kCoarsest : shifted;
        shifted = f < -127 ? kExact : shifted;
        return int8_t(theta == 0 ? kExact : shifted);
    };
    auto exponent_at = [](const uint8_t* from, int i) { return int(value_at<uint32_t>(from, i) >> 23 & 255); };
    const uint8_t* theta = reinterpret_cast<const uint8_t*>(rule.theta + start);
    const uint8_t* second = reinterpret_cast<const uint8_t*>(rule.second + (rule.second ? start : 0));
    if (!rule.second) {
        for (int i = 0; i < n; i++) {
            int e = exponent_at(theta, i);
            out[i] = finish(e, e + c0);
        }
        return;
    }
    for (int i = 0; i < n; i++) {
        int e = exponent_at(theta, i), v = exponent_at(second, i) + c1;
        out[i] = finish(e, e + c0 + ((v > c2 ? v : c2) >> 1));
    }
}
