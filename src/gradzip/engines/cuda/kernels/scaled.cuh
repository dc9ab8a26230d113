// Block-scaled codes: docs/format.md has the arithmetic and the frames; reference_scaled.py is the oracle.
//
// A message is described by tables in device memory, made once for its layout. A warp takes a tile of 256 values of a
// part, each thread 8 of them one behind the other; a block of values belongs to 4, 8, 16 or 32 neighbouring threads.

constexpr u32 kScaledTile = 256, kScaledWarps = 4;
constexpr int kInt8 = 0, kInt4 = 1, kFp8 = 2;
constexpr u32 kNanScale = 0x7fc0, kLeastScale = 0x80;

// scaled.py packs the same fields.
struct ScaledPart {
    u64 values;         // address of its first value: a rank's own, or where decoded ones go
    u64 key, signs;     // of the tensor's name: for draws, and for the signs of a transform
    u64 start, length;  // index of the first value in the tensor; number of values
    u64 scale_at;       // number of its first scale in the frame
    u64 code_at;        // byte of its first code
    u32 frame, padding; // which frame it lies in
};
struct Scaled {
    u64 parts;    // ScaledPart[]
    u64 tiles;    // uint2[]: part, tile
    u64 terms;    // u64[frames][term_count]: addresses of frames that are added up
    u64 frames;   // u64[frames]: addresses of those that are written
    u64 length;   // tiles
    u32 step, offset;          // `offset` is added to draws
    u32 term_count, own;       // `own`: the term that is the own values; ~0: none
    float divisor, times;      // of sums; `times`: the reciprocal, where it is exact, else 0
    u32 named, padding;        // whether keys are those of names, which the step is still to be mixed into
};

DEVICE const Scaled& scaled_args(const Args& a) { return *(const Scaled*)&a; }

template <int kKind>
DEVICE float scaled_most() { return kKind == kInt8 ? 127.0f : kKind == kInt4 ? 7.0f : 448.0f; }

// The largest value of a type; codes may stand for more.
template <class F>
struct Largest;
template <>
struct Largest<Float32> {
    DEVICE float value() { return kLargest; }
};
template <>
struct Largest<BFloat16> {
    DEVICE float value() { return __uint_as_float(0x7f7f0000u); }
};
template <>
struct Largest<Float16> {
    DEVICE float value() { return 65504.0f; }
};
// On bits: of comparisons the compiler may make instructions that turn the canonical NaN into another one.
DEVICE float bounded(float v, float most) {
    u32 bits = __float_as_uint(v), size = bits & 0x7fffffffu, limit = __float_as_uint(most);
    if (size > 0x7f800000u) return __uint_as_float(kCanonicalNan);
    return __uint_as_float(size > limit ? (bits & 0x80000000u) | limit : bits);
}

struct ScaledKey {
    u32 k0, k1;
};
DEVICE ScaledKey key_in_step(const Scaled& a, u64 name) {
    u32 low = (u32)name, high = (u32)(name >> 32);
    if (!a.named) return {low, high};
    return {mix32(low ^ mix32(a.step)), mix32(high + a.step * 0x9e3779b9u)};
}

// Up or down at random; |t| is far below 2^31.
DEVICE int rounded_at_random(float t, u32 draw) {
    int below = (int)t;
    below -= (float)below > t;
    u32 rest = (u32)(int)__fmul_rn(__fsub_rn(t, (float)below), 16777216.0f);
    return below + (int)((rest + (draw >> 8)) >> 24);
}

// One code of up to 8 bits.
template <int kKind>
DEVICE u32 scaled_code_of(float t, u32 draw) {
    if (kKind == kFp8) {
        int field = (int)(__float_as_uint(t) >> 23 & 255);
        field = field > 121 ? field : 121;
        int q = rounded_at_random(__fmul_rn(t, __uint_as_float((u32)(257 - field) << 23)), draw);
        int magnitude = (q < 0 ? -q : q) + 8 * (field - 121);
        return (u32)(magnitude < 126 ? magnitude : 126) | (q < 0 ? 128u : 0u);
    }
    int most = (int)scaled_most<kKind>(), q = rounded_at_random(t, draw);
    q = q < most ? q : most;
    return (u32)(q > -most ? q : -most) & (kKind == kInt4 ? 15u : 255u);
}

DEVICE float fp8_value(u32 code) {
    u32 low = code & 127, field = low >> 3 ? low >> 3 : 1;
    float number = __fmul_rn((float)(int)(low >> 3 ? (low & 7) | 8 : low), __uint_as_float((field + 117) << 23));
    if (low == 127) number = __uint_as_float(kCanonicalNan);
    return __uint_as_float(__float_as_uint(number) ^ (code & 128) << 24);
}

DEVICE float shuffled_float(float v, int mask) { return __uint_as_float(__shfl_xor_sync(kAll, __float_as_uint(v), mask)); }
DEVICE int shuffled_number(int v, int mask) { return (int)__shfl_xor_sync(kAll, (u32)v, mask); }

// The Walsh-Hadamard transform of each block, by all threads of a warp.
template <int kBlockValues>
DEVICE void transform(float* x) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (!(j & step)) {
                float a = x[j], b = x[j + step];
                x[j] = __fadd_rn(a, b), x[j + step] = __fsub_rn(a, b);
            }
#pragma unroll
    for (int lanes = 1; lanes < kBlockValues / 8; lanes *= 2) {
        bool upper = lane_id() & lanes;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float other = shuffled_float(x[j], lanes);
            x[j] = upper ? __fsub_rn(other, x[j]) : __fadd_rn(x[j], other);
        }
    }
}
template <int kBlockValues>
DEVICE void transform(int* x) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (!(j & step)) {
                int a = x[j], b = x[j + step];
                x[j] = a + b, x[j + step] = a - b;
            }
#pragma unroll
    for (int lanes = 1; lanes < kBlockValues / 8; lanes *= 2) {
        bool upper = lane_id() & lanes;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int other = shuffled_number(x[j], lanes);
            x[j] = upper ? other - x[j] : x[j] + other;
        }
    }
}

// Where a thread's 8 values are.
struct ScaledPlace {
    u64 first;     // number of the first one in its part
    int count;     // how many of them there are
    bool in_room;  // whether the frame has codes for them, if only zeros
    bool full;     // whether their block is full, so that it is transformed
    u32 flips;     // bit j: the sign of value j changes
};

template <class F>
DEVICE void load_eight(u64 values, const ScaledPlace& p, float* x) {
    if (p.count == 8) {
        Values<F>::load_four(values, p.first, x);
        Values<F>::load_four(values, p.first + 4, x + 4);
    } else
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = j < p.count ? Values<F>::load(values, p.first + (u32)j) : 0.0f;
}

// The numbers of a frame at that place.
template <int kKind, int kBlockValues, bool kHadamard>
DEVICE void decode_eight(const u8* frame, const ScaledPart& part, const ScaledPlace& p, float* x) {
    u32 low = 0, high = 0, scale = 0;
    if (p.in_room) {
        const u8* codes = frame + part.code_at + (kKind == kInt4 ? p.first / 2 : p.first);
        if (kKind == kInt4) low = *(const u32*)codes;
        else {
            uint2 both = *(const uint2*)codes;
            low = both.x, high = both.y;
        }
        if (p.count > 0) scale = ((const u16*)frame)[part.scale_at + p.first / kBlockValues];
    }
    float factor = __uint_as_float(scale << 16);
    int q[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (kKind == kInt4) q[j] = (int)(low << (28 - 4 * j)) >> 28;
        else q[j] = (int)((j < 4 ? low : high) << (24 - 8 * (j & 3))) >> 24;
    }
    if (kHadamard) {
        int turned[8];
#pragma unroll
        for (int j = 0; j < 8; j++) turned[j] = q[j];
        transform<kBlockValues>(turned);
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (p.full) q[j] = p.flips >> j & 1 ? -turned[j] : turned[j];
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float v = canonical(__fmul_rn(kKind == kFp8 ? fp8_value((u32)q[j]) : (float)q[j], factor));
        x[j] = j < p.count ? bounded(v, kLargest) : 0.0f;
    }
}

template <int kKind, int kBlockValues, bool kHadamard>
DEVICE void encode_eight(const Scaled& a, u8* frame, const ScaledPart& part, const ScaledPlace& p, float* x) {
    if (kHadamard) {
        float turned[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            turned[j] = __uint_as_float(__float_as_uint(__fmul_rn(x[j], 1.0f / kBlockValues)) ^ (p.flips >> j & 1) << 31);
        transform<kBlockValues>(turned);
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (p.full) x[j] = turned[j];
    }
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        u32 bits = __float_as_uint(x[j]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
#pragma unroll
    for (int lanes = 1; lanes < kBlockValues / 8; lanes *= 2) {
        u32 other = __shfl_xor_sync(kAll, most, lanes);
        most = other > most ? other : most;
    }
    if (kHadamard && p.full && most < 0x00800000u) most = 0;
    constexpr float divisor = kKind == kInt8 ? 127.0f : kKind == kInt4 ? 7.0f : 448.0f;
    u32 largest = __float_as_uint(__fdiv_rn(kLargest, divisor)) >> 16;
    u32 scale = (__float_as_uint(__fdiv_rn(__uint_as_float(most), divisor)) + 0xffffu) >> 16;
    scale = scale < kLeastScale ? kLeastScale : scale < largest ? scale : largest;
    bool coded = most > 0 && most < 0x7f800000u;
    if (!coded) scale = most ? kNanScale : 0;
    float inverse = coded ? __fdiv_rn(1.0f, __uint_as_float(scale << 16)) : 0.0f;
    ScaledKey key = key_in_step(a, part.key);
    u32 low = 0, high = 0, index = (u32)(part.start + p.first);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        u32 draw = mix32((index + (u32)j) ^ key.k0) + key.k1 + a.offset;
        u32 code = coded ? scaled_code_of<kKind>(__fmul_rn(x[j], inverse), draw) : 0;
        if (kKind == kInt4) low |= code << 4 * j;
        else if (j < 4) low |= code << 8 * j;
        else high |= code << 8 * (j - 4);
    }
    if (!p.in_room) return;
    u8* codes = frame + part.code_at + (kKind == kInt4 ? p.first / 2 : p.first);
    if (kKind == kInt4) *(u32*)codes = low;
    else *(uint2*)codes = make_uint2(low, high);
    if (p.count > 0 && p.first % kBlockValues == 0) ((u16*)frame)[part.scale_at + p.first / kBlockValues] = (u16)scale;
}

// Codes a tile: own values, or sums of frames; into a frame, or into values.
template <class F, int kKind, int kBlockValues, bool kHadamard, bool kSums, bool kWrites>
DEVICE void scaled_tile(const Args& args) {
    const Scaled& a = scaled_args(args);
    u64 tile = (u64)blockIdx.x * kScaledWarps + warp_id();
    if (tile >= a.length) return;
    uint2 which = pointer<const uint2>(a.tiles)[tile];
    const ScaledPart part = pointer<const ScaledPart>(a.parts)[which.x];
    ScaledPlace p;
    p.first = (u64)which.y * kScaledTile + 8 * lane_id();
    p.count = p.first + 8 <= part.length ? 8 : p.first < part.length ? (int)(part.length - p.first) : 0;
    p.in_room = p.first < (part.length + 31) / 32 * 32;
    p.full = p.first / kBlockValues * kBlockValues + kBlockValues <= part.length;
    p.flips = 0;
    if (kHadamard) {
        ScaledKey signs = key_in_step(a, part.signs);
        u32 index = (u32)(part.start + p.first);
        p.flips = (mix32(index / 32 ^ signs.k0) + signs.k1) >> index % 32;
    }
    float x[8];
    if (kSums) {
        const u64* terms = pointer<const u64>(a.terms) + (u64)part.frame * a.term_count;
        for (u32 t = 0; t < a.term_count; t++) {
            float y[8];
            if (t == a.own) load_eight<F>(part.values, p, y);
            else decode_eight<kKind, kBlockValues, kHadamard>(pointer<const u8>(terms[t]), part, p, y);
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] = canonical(t ? __fadd_rn(x[j], y[j]) : y[j]);
        }
        if (a.divisor != 1.0f)
#pragma unroll
            for (int j = 0; j < 8; j++)  // a GPU makes another NaN of the canonical one
                x[j] = canonical(a.times != 0.0f ? __fmul_rn(x[j], a.times) : __fdiv_rn(x[j], a.divisor));
    } else load_eight<F>(part.values, p, x);
    if (kWrites) {
        encode_eight<kKind, kBlockValues, kHadamard>(a, pointer<u8>(pointer<const u64>(a.frames)[part.frame]), part, p, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = bounded(x[j], Largest<F>::value());
    if (p.count == 8) {
        Values<F>::store_four(part.values, p.first, x);
        Values<F>::store_four(part.values, p.first + 4, x + 4);
    } else
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (j < p.count) Values<F>::store(part.values, p.first + (u32)j, x[j]);
}

template <class F, int kKind, int kBlockValues, bool kHadamard>
DEVICE void scaled_encode(const Args& args) { scaled_tile<F, kKind, kBlockValues, kHadamard, false, true>(args); }
template <class F, int kKind, int kBlockValues, bool kHadamard>
DEVICE void scaled_reduce(const Args& args) { scaled_tile<F, kKind, kBlockValues, kHadamard, true, true>(args); }
template <class F, int kKind, int kBlockValues, bool kHadamard>
DEVICE void scaled_decode(const Args& args) { scaled_tile<F, kKind, kBlockValues, kHadamard, true, false>(args); }
