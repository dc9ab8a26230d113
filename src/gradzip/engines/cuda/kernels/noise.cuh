// The codec noise: docs/format.md, "Noise", has the arithmetic and the frames; reference_noise.py is the oracle.
//
// A message is described by tables in device memory, made once for its layout: parts, frames, and the blocks of all
// frames. One launch works on all of them, whatever the number of tensors. A step passes its number and nothing else.
// This file has what the kernels share, and the statistics that levels are made of.

constexpr u32 kNoiseBlock = 8192, kNoiseRow = 128, kNoiseRows = 64, kNoiseLanes = 16;
constexpr u32 kFrameStart = 0x11015a47u;  // "GZ", version 1, codec 17
constexpr u32 kNoiseHead = 16;        // bytes of a body's head
constexpr u32 kSquares = 4096;        // terms of a block of the ordered sum
constexpr u32 kNarrowMost = 119;      // the largest |q| that is no giant in a class with 3 low bits or less
constexpr u32 kWideClass = 28, kClasses = 48, kRawClass = 255;
constexpr u32 kCandidates = 35;       // notches that an encoder tries
constexpr u32 kStageBytes = 8192;     // room for a block before its place in the frame is known; larger ones are coded again
constexpr u32 kCanonicalNan = 0x7fc00000u;
constexpr float kLargest = 3.40282347e+38f, kLeast = 1.17549435e-38f;

// What is wrong with a frame; the host has a message for each.
enum { kNoiseHeader = 1, kNoiseStep = 2, kNoiseLevels = 4, kNoiseIndex = 8, kNoiseBlocks = 16, kNoisePoisoned = 32 };
enum { kRefused = 0, kFine = 1, kPoisoned = 2 };  // what became of a frame that was opened

// noise.py packs the same fields.
struct NoiseTensor {
    u64 values, shape, numel;  // `shape`: int8, or 0
    u64 first;                 // where the sums of its blocks begin
};
struct NoisePart {
    u64 values;   // address of its first value
    u64 shape;    // of its first int8, or 0
    u64 key;      // of the tensor's name
    u64 start;    // index of its first value in the tensor
    u64 place;    // in the frame, in values
    u64 length;
    u32 level;    // where its level is
    u32 padding;
};
struct NoiseFrame {
    u64 slot, room;    // address and bytes
    u64 values;        // in the frame's sequence, gaps included
    u64 numel;
    u32 first_part, parts;
    u32 first_block, blocks;
};
// Of a frame that is encoded: what the groups of threads tell each other. All 0 before and after.
struct NoiseState {
    u32 done;      // blocks whose sizes are known
    u32 retried;   // the same for coarser levels
    u32 overflow;  // the frame does not fit at notch 0
    u32 padding;
};
// What is known of an encoded frame afterwards.
struct NoiseResult {
    u64 bytes;  // of the frame
    u32 notch;
    u32 poisoned;
};

struct Noise {
    u64 tensors;   // NoiseTensor[]
    u64 tiles;     // uint2[]: tensor, block of kSquares values
    u64 squares;   // double[tiles]; of noise_decode: double[blocks], the sums of squares of means, or 0
    u64 marks;     // u64[tensors][2]: sum of weights; blocks done in the low half, whether all is finite in the high one
    u64 parts;     // NoisePart[]
    u64 frames;    // NoiseFrame[]
    u64 blocks;    // uint2[]: frame, first part
    u64 levels;    // float2[]: a level and its reciprocal
    u64 tables;    // see noise.py
    u64 staging;   // kStageBytes per block
    u64 sizes;     // u32[blocks]: bytes, and whether the block is staged in bit 31
    u64 retries;   // u16[kCandidates][blocks]: bytes at coarser levels
    u64 offsets;   // u64[blocks]: where blocks begin in their frames
    u64 states;    // NoiseState[frames]
    u64 results;   // NoiseResult[frames]
    u64 verdicts;  // u32[]: what became of each frame that was opened
    u64 status;    // u32[]: what is wrong with each frame
    u64 sums;      // NoisePart[]: the parts of this owner, whose values are sums; for noise_open and noise_add
    u64 sum_levels;// float2[]: levels of the sums
    u64 length;    // blocks, tiles or frames of this launch
    double factor; // of a level: b (12 / hops W / (W + 1))
    u32 step, digest, offset, prefix;  // `offset` is added to draws; `prefix`: bytes before a body
    u32 rank, world, poisonous, all_blocks;  // `poisonous`: incoming frames that may poison this one
    float divisor, times;  // of means; `times`: the reciprocal of the divisor, where it is exact, else 0
};

DEVICE const Noise& noise_args(const Args& a) { return *(const Noise*)&a; }

// --- Tables that never change; noise.py lays them out ------------------------------------------------------------------

struct NoiseTables {
    u32 encode[20][256];    // by pair: code, its length from bit 12 on, which of the two digits are escapes from bit 16 on
    u16 decode[20][4096];   // by the next 12 bits: pair, length of its code from bit 8 on
    u32 thresholds[64];     // 47, then ~0
    float notches[128];     // 2^(c / 4)
    u32 reaches[20];
};
DEVICE const NoiseTables& noise_tables(const Noise& a) { return *pointer<const NoiseTables>(a.tables); }

DEVICE u32 low_bits_of(u32 number) { return number < 16 ? 0 : 1 + (number - 16) / 4; }
DEVICE u32 table_of(u32 number) { return number < 16 ? number : 16 + (number - 16) % 4; }
DEVICE u32 notch_of(u32 candidate) { return candidate < 4 ? candidate : 4 * (candidate - 3); }

// --- Arithmetic --------------------------------------------------------------------------------------------------------

DEVICE u32 mix32(u32 x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}
DEVICE bool is_nan(float v) { return (__float_as_uint(v) & 0x7fffffffu) > 0x7f800000u; }
DEVICE bool is_finite_float(float v) { return (__float_as_uint(v) & 0x7fffffffu) < 0x7f800000u; }
DEVICE float canonical(float v) { return is_nan(v) ? __uint_as_float(kCanonicalNan) : v; }
DEVICE float power_of_two(int exponent) { return __uint_as_float((u32)(127 + exponent) << 23); }

// A level from its square, in float64.
DEVICE float as_level(double square) {
    double root = sqrt(square);
    float level = (float)root;
    return level < kLeast ? kLeast : level < kLargest ? level : kLargest;
}
DEVICE float reciprocal(float level) { return level == 0.0f || is_nan(level) ? 0.0f : (float)(1.0 / (double)level); }
DEVICE float coarser(float level, float factor) {
    float used = __fmul_rn(level, factor);
    return is_nan(used) || used < kLargest ? used : kLargest;
}

// --- Values of 16 and 32 bits ------------------------------------------------------------------------------------------

template <class F>
struct Values;
template <>
struct Values<Float32> {
    DEVICE float rounded(float v) { return v; }
    DEVICE float load(u64 values, u64 i) { return pointer<const float>(values)[i]; }
    DEVICE void store(u64 values, u64 i, float v) { pointer<float>(values)[i] = v; }
    DEVICE void load_four(u64 values, u64 i, float* v) {
        const float* from = pointer<const float>(values) + i;
        if (((u64)from & 15) == 0) {
            float4 four = *(const float4*)from;
            v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = from[j];
        }
    }
    DEVICE void store_four(u64 values, u64 i, const float* v) {
        float* to = pointer<float>(values) + i;
        if (((u64)to & 15) == 0) *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
        else
#pragma unroll
            for (int j = 0; j < 4; j++) to[j] = v[j];
    }
};
template <class F>
struct Half;
template <>
struct Half<BFloat16> {
    DEVICE float value(u32 bits) { return __uint_as_float(bits << 16); }
    DEVICE u32 bits(float v) {
        u32 b = __float_as_uint(v);
        return is_nan(v) ? 0x7fc0u : (b + 0x7fff + (b >> 16 & 1)) >> 16;
    }
};
template <>
struct Half<Float16> {
    DEVICE float value(u32 bits) { return Sum<Float16>::half_value(bits); }
    DEVICE u32 bits(float v) { return is_nan(v) ? 0x7e00u : Sum<Float16>::half_bits(v); }
};

template <class F>
struct Halves {
    DEVICE float rounded(float v) { return Half<F>::value(Half<F>::bits(v)); }
    DEVICE float load(u64 values, u64 i) { return Half<F>::value(pointer<const u16>(values)[i]); }
    DEVICE void store(u64 values, u64 i, float v) { pointer<u16>(values)[i] = (u16)Half<F>::bits(v); }
    DEVICE void load_four(u64 values, u64 i, float* v) {
        const u16* from = pointer<const u16>(values) + i;
        if (((u64)from & 7) == 0) {
            uint2 four = *(const uint2*)from;
            v[0] = Half<F>::value(four.x & 0xffff), v[1] = Half<F>::value(four.x >> 16);
            v[2] = Half<F>::value(four.y & 0xffff), v[3] = Half<F>::value(four.y >> 16);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = Half<F>::value(from[j]);
        }
    }
    DEVICE void store_four(u64 values, u64 i, const float* v) {
        u16* to = pointer<u16>(values) + i;
        if (((u64)to & 7) == 0)
            *(uint2*)to = make_uint2(Half<F>::bits(v[0]) | Half<F>::bits(v[1]) << 16, Half<F>::bits(v[2]) | Half<F>::bits(v[3]) << 16);
        else
#pragma unroll
            for (int j = 0; j < 4; j++) to[j] = (u16)Half<F>::bits(v[j]);
    }
};
template <>
struct Values<BFloat16> : Halves<BFloat16> {};
template <>
struct Values<Float16> : Halves<Float16> {};

// --- Statistics --------------------------------------------------------------------------------------------------------

DEVICE double shuffled_double(double v, int mask) {
    u64 bits;
    memcpy(&bits, &v, 8);
    bits = __shfl_xor_sync(kAll, bits, mask);
    memcpy(&v, &bits, 8);
    return v;
}

// Lane j += lane j + 16, then + 8 ...: the xor of lanes below 16 finds the same partners, and the sum of two is that of two.
DEVICE double halved(double v) {
    for (int step = 16; step; step >>= 1) v = v + shuffled_double(v, step);
    return v;
}

// The sum of `count` terms in the order of the format, by one warp; writes over them.
DEVICE double ordered_sum(double* terms, u64 count) {
    u32 lane = lane_id();
    while (count > 1) {
        u64 groups = (count + kSquares - 1) / kSquares;
        for (u64 g = 0; g < groups; g++) {
            u64 end = (g + 1) * kSquares < count ? (g + 1) * kSquares : count;
            double v = 0.0;
#pragma unroll 8
            for (u64 i = g * kSquares + lane; i < end; i += 32) v = v + __ldcg(terms + i);
            v = halved(v);
            __syncwarp();
            if (lane == 0) terms[g] = v;
            __threadfence_block();
        }
        __syncwarp();
        count = groups;
    }
    return __ldcg(terms);
}

// Statistics and levels of whole tensors: a warp for each block of terms. The last one of a tensor adds them up.
template <class F>
DEVICE void noise_measure(const Args& args) {
    const Noise& a = noise_args(args);
    u64 tile = (u64)blockIdx.x * 4 + warp_id();
    if (tile >= a.length) return;
    u32 lane = lane_id();
    uint2 which = pointer<const uint2>(a.tiles)[tile];
    const NoiseTensor& t = pointer<const NoiseTensor>(a.tensors)[which.x];
    u64 start = (u64)which.y * kSquares, end = start + kSquares < t.numel ? start + kSquares : t.numel;
    const i8* shape = pointer<const i8>(t.shape);
    double v = 0.0;
    bool finite = true;
    u64 weights = 0;
    if (shape == 0 && end - start == kSquares) {
#pragma unroll 16
        for (u32 i = 0; i < kSquares; i += 32) {
            float x = Values<F>::load(t.values, start + i + lane);
            bool fine = is_finite_float(x);
            finite = finite && fine;
            double wide = fine ? (double)x : 0.0;
            v = v + wide * wide;
        }
    } else {
#pragma unroll 4
        for (u64 i = start + lane; i < end; i += 32) {
            float x = Values<F>::load(t.values, i);
            bool fine = is_finite_float(x);
            finite = finite && fine;
            double wide = fine ? (double)x : 0.0;
            v = v + wide * wide;
            if (shape) weights += 1ull << 2 * (shape[i] + 12);
        }
    }
    v = halved(v);
    finite = !any(!finite);
    if (shape)
        for (int step = 16; step; step >>= 1) weights += __shfl_xor_sync(kAll, weights, step);
    else weights = (end - start) << 24;
    double* terms = pointer<double>(a.squares) + t.first;
    u64* marks = pointer<u64>(a.marks) + 2 * which.x;
    u64 blocks = (t.numel + kSquares - 1) / kSquares;
    u32 last = 0;
    if (lane == 0) {
        terms[which.y] = v;
        atomicAdd(marks, weights);
        if (!finite) atomicOr(marks + 1, 1ull << 63);
        __threadfence();
        last = (atomicAdd(marks + 1, 1ull) & 0x7fffffffffffffffull) == blocks - 1;
        __threadfence();
    }
    if (!__shfl_sync(kAll, last, 0)) return;
    double all = ordered_sum(terms, blocks);
    if (lane == 0) {
        u64 sum_of_weights = __ldcg(marks), rest = __ldcg(marks + 1);
        float level;
        if (all == 0.0) level = rest >> 63 ? __uint_as_float(kCanonicalNan) : 0.0f;
        else level = as_level((a.factor * all) / ((double)sum_of_weights / 16777216.0));
        pointer<float2>(a.levels)[which.x] = make_float2(level, reciprocal(level));
        if (a.sum_levels) {  // the host asks for the statistics
            u64* told = pointer<u64>(a.sum_levels) + 3 * which.x;
            memcpy(told, &all, 8);
            told[1] = sum_of_weights;
            told[2] = !(rest >> 63);
        }
        marks[0] = 0;
        marks[1] = 0;
    }
}

// --- Shapes from second moments ------------------------------------------------------------------------------------------
// sensitivity/shape.py has the same for one tensor at a time. A tensor that is not fit for a shape gets zeros, which code
// like no shape at all. Here `values` of a tensor are second moments and `shape` is written.

constexpr u32 kUnfit = 1u << 16;

// The largest upper 7 bits of exponents of each tensor, plus 1; 0: all values are zero. marks: u64 each, 0 before.
DEVICE void noise_exponents(const Args& args) {
    const Noise& a = noise_args(args);
    u64 tile = (u64)blockIdx.x * 4 + warp_id();
    if (tile >= a.length) return;
    uint2 which = pointer<const uint2>(a.tiles)[tile];
    const NoiseTensor& t = pointer<const NoiseTensor>(a.tensors)[which.x];
    u64 start = (u64)which.y * kSquares, end = start + kSquares < t.numel ? start + kSquares : t.numel;
    const u32* values = pointer<const u32>(t.values);
    u32 most = 0;
#pragma unroll 8
    for (u64 i = start + lane_id(); i < end; i += 32) {
        u32 bits = values[i];
        u32 mark = bits >= 0x7f800000u ? kUnfit : bits ? (bits >> 24) + 1 : 0;
        most = mark > most ? mark : most;
    }
    for (int step = 16; step; step >>= 1) {
        u32 other = __shfl_xor_sync(kAll, most, step);
        most = other > most ? other : most;
    }
    if (lane_id() == 0 && most) atomicMax(pointer<u64>(a.marks) + which.x, (u64)most);
}

DEVICE void noise_shape(const Args& args) {
    const Noise& a = noise_args(args);
    u64 tile = (u64)blockIdx.x * 4 + warp_id();
    if (tile >= a.length) return;
    uint2 which = pointer<const uint2>(a.tiles)[tile];
    const NoiseTensor& t = pointer<const NoiseTensor>(a.tensors)[which.x];
    u64 start = (u64)which.y * kSquares, end = start + kSquares < t.numel ? start + kSquares : t.numel;
    const u32* values = pointer<const u32>(t.values);
    i8* shape = pointer<i8>(t.shape);
    u32 most = (u32)pointer<const u64>(a.marks)[which.x];
    bool fit = most != 0 && most < kUnfit;
#pragma unroll 8
    for (u64 i = start + lane_id(); i < end; i += 32) {
        int depth = fit ? (int)(values[i] >> 24) - (int)(most - 1) : 0;
        shape[i] = (i8)(depth < -12 ? -12 : depth);
    }
}
