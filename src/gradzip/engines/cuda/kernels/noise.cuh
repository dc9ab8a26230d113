// The codec noise: docs/format.md, "Noise", has the arithmetic and the frames; reference_noise.py is the oracle.
//
// A message is described by tables in device memory, made once for its layout: parts, frames, and the blocks of all
// frames. One launch works on all of them, whatever the number of tensors. A step passes its number and nothing else.
// This file has what the kernels share, and the statistics that levels are made of.

constexpr u32 kNoiseBlock = 8192, kNoiseRow = 128, kNoiseRows = 64, kNoiseLanes = 16;
constexpr u32 kFrameStart = 0x11015a47u;  // "GZ", version 1, codec 17
constexpr u32 kNoiseHead = 16;        // bytes of a body's head
constexpr u32 kSquares = 4096;        // terms of a block of the ordered sum
constexpr u32 kAhead = 16;            // loads of a thread under way, in sums
constexpr u32 kShapedAhead = 8;       // the same where there are two loads for each
constexpr u32 kNarrowMost = 119;      // the largest |q| that is no giant in a class with 3 low bits or less
constexpr u32 kWideClass = 28, kClasses = 48, kRawClass = 255;
constexpr u32 kCandidates = 35;       // notches that an encoder tries
constexpr u32 kStageBytes = 8192;     // larger blocks are coded again, with more shared memory
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
// Of a frame that is encoded: what the groups of threads tell each other. All 0 at first.
struct NoiseState {
    u32 done;      // blocks that are in their places
    u32 retried;   // those whose sizes at coarser levels are known
    u32 overflow;  // the frame does not fit at notch 0
    u32 left;      // some block is left to noise_place
    u32 launch;    // how many launches there were
    // Of the first frame, for all of them:
    u32 ticket;    // blocks that groups have taken
    u32 again;     // the number of the last launch that left work for noise_coarsen and noise_place
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
    u64 progress;  // u64[blocks]: see noise_encode.cuh; 0 at first
    u64 left;      // u32[blocks]: whether the block is left to noise_place
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
    u32 encode[20][256];    // by pair: length of its code, how many of the two digits are escapes from bit 5 on, code from bit 8 on
    // By the next 10 bits: the pair's digits from bits 0 and 8 on, the length of its code from bit 12 on. Codes of 11 and 12
    // bits have a length of 0 there, and a number n: the next 2 bits tell which entry it is of the 4 from 1024 + 4 n on.
    u16 decode[20][1280];
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
    DEVICE bool pairs(u64 values) { return (values & 7) == 0; }  // whether two of them can be loaded at once
    DEVICE void load_pair(u64 values, u64 i, float* v) {
        float2 two = *(const float2*)(pointer<const float>(values) + i);
        v[0] = two.x, v[1] = two.y;
    }
    DEVICE void load_even(u64 values, u64 i, float* v) {  // at an address that is a multiple of all four's size
        float4 four = *(const float4*)(pointer<const float>(values) + i);
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    }
    DEVICE void load_four(u64 values, u64 i, float* v) {
        const float* from = pointer<const float>(values) + i;
        if (((u64)from & 15) == 0) load_even(values, i, v);
        else {
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
    DEVICE bool pairs(u64 values) { return (values & 3) == 0; }
    DEVICE void load_pair(u64 values, u64 i, float* v) {
        u32 two = *(const u32*)(pointer<const u16>(values) + i);
        v[0] = Half<F>::value(two & 0xffff), v[1] = Half<F>::value(two >> 16);
    }
    DEVICE void load_even(u64 values, u64 i, float* v) {
        uint2 four = *(const uint2*)(pointer<const u16>(values) + i);
        v[0] = Half<F>::value(four.x & 0xffff), v[1] = Half<F>::value(four.x >> 16);
        v[2] = Half<F>::value(four.y & 0xffff), v[3] = Half<F>::value(four.y >> 16);
    }
    DEVICE void load_four(u64 values, u64 i, float* v) {
        const u16* from = pointer<const u16>(values) + i;
        if (((u64)from & 7) == 0) load_even(values, i, v);
        else {
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
            for (u64 i = g * kSquares + lane; i < end; i += 32 * kAhead) {
                double x[kAhead];  // all under way at once: a warp alone waits for memory, and 0 added changes nothing
#pragma unroll
                for (u32 j = 0; j < kAhead; j++) x[j] = i + 32 * j < end ? __ldcg(terms + i + 32 * j) : 0.0;
#pragma unroll
                for (u32 j = 0; j < kAhead; j++) v = v + x[j];
            }
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

// The level of a tensor from the sums of all its blocks, by a warp.
DEVICE void finish_level(const Noise& a, u32 number) {
    const NoiseTensor& t = pointer<const NoiseTensor>(a.tensors)[number];
    u64* marks = pointer<u64>(a.marks) + 2 * number;
    double all = ordered_sum(pointer<double>(a.squares) + t.first, (t.numel + kSquares - 1) / kSquares);
    if (lane_id() != 0) return;
    u64 sum_of_weights = __ldcg(marks), rest = __ldcg(marks + 1);
    float level;
    if (all == 0.0) level = rest >> 63 ? __uint_as_float(kCanonicalNan) : 0.0f;
    else level = as_level((a.factor * all) / ((double)sum_of_weights / 16777216.0));
    pointer<float2>(a.levels)[number] = make_float2(level, reciprocal(level));
    if (a.sum_levels) {  // the host asks for the statistics
        u64* told = pointer<u64>(a.sum_levels) + 3 * number;
        memcpy(told, &all, 8);
        told[1] = sum_of_weights;
        told[2] = !(rest >> 63);
    }
    marks[0] = 0;
    marks[1] = 0;
}

// Statistics and levels of whole tensors.
// Half a warp for each block of terms, so that every thread has two of its 32 lanes: loads are as wide as lines of memory
// and two sums do not wait for each other. The last half warp of a tensor adds up the sums of its blocks.
constexpr u32 kMeasured = 4;  // blocks of a group

struct Squares {  // of two lanes
    double v[2];
    bool finite;

    __device__ void add(int lane, float x) {
        bool fine = is_finite_float(x);
        finite = finite && fine;
        double wide = fine ? (double)x : 0.0;
        v[lane] = __fma_rn(wide, wide, v[lane]);  // the product is exact
    }
    __device__ double halved() const {
        double one = v[0], two = v[1];
        for (int step = 8; step; step >>= 1) {
            one = one + shuffled_double(one, step);
            two = two + shuffled_double(two, step);
        }
        return one + two;
    }
};

template <class F>
DEVICE void noise_measure(const Args& args) {
    const Noise& a = noise_args(args);
    u32 l = threadIdx.x % 16;
    u64 tile = (u64)blockIdx.x * kMeasured + threadIdx.x / 16;
    bool there = tile < a.length;
    uint2 which = pointer<const uint2>(a.tiles)[there ? tile : 0];
    const NoiseTensor& t = pointer<const NoiseTensor>(a.tensors)[which.x];
    u64 start = (u64)which.y * kSquares, end = start + kSquares < t.numel ? start + kSquares : t.numel;
    if (!there) end = start;
    const i8* shape = pointer<const i8>(t.shape);
    Squares sums = {{0.0, 0.0}, true};
    u64 weights = 0, values = t.values;
    if (shape == 0 && end - start == kSquares && Values<F>::pairs(values)) {
#pragma unroll 1
        for (u32 i = 2 * l; i < kSquares; i += 32 * kAhead) {
            float x[kAhead][2];
#pragma unroll
            for (u32 j = 0; j < kAhead; j++) Values<F>::load_pair(values, start + i + 32 * j, x[j]);
#pragma unroll
            for (u32 j = 0; j < kAhead; j++) sums.add(0, x[j][0]), sums.add(1, x[j][1]);
        }
    } else {  // what is beyond the end counts as 0, which changes no sum
        u32 count = (u32)(end - start);
        bool pairs = Values<F>::pairs(values) && ((u64)shape & 1) == 0;
#pragma unroll 1
        for (u32 i = 2 * l; i < count; i += 32 * kShapedAhead) {
            float x[kShapedAhead][2];
            u32 depths[kShapedAhead];  // of both, a byte each
#pragma unroll
            for (u32 j = 0; j < kShapedAhead; j++) {
                u32 at = i + 32 * j;
                depths[j] = 0;
                x[j][0] = x[j][1] = 0.0f;
                if (pairs && at + 1 < count) {
                    Values<F>::load_pair(values, start + at, x[j]);
                    if (shape) depths[j] = *(const u16*)(shape + start + at);
                } else {
                    if (at < count) x[j][0] = Values<F>::load(values, start + at);
                    if (at + 1 < count) x[j][1] = Values<F>::load(values, start + at + 1);
                    if (shape && at < count) depths[j] = (u8)shape[start + at];
                    if (shape && at + 1 < count) depths[j] |= (u32)(u8)shape[start + at + 1] << 8;
                }
            }
#pragma unroll
            for (u32 j = 0; j < kShapedAhead; j++) {
                u32 at = i + 32 * j;
                sums.add(0, x[j][0]), sums.add(1, x[j][1]);
                if (shape && at < count) weights += 1ull << 2 * ((i8)(depths[j] & 0xff) + 12);
                if (shape && at + 1 < count) weights += 1ull << 2 * ((i8)(depths[j] >> 8) + 12);
            }
        }
    }
    double v = sums.halved();
    u32 flawed = __ballot_sync(kAll, !sums.finite) >> (lane_id() & 16) & 0xffff;
    if (shape == 0) weights = l == 0 ? (end - start) << 24 : 0;
    for (int step = 8; step; step >>= 1) weights += __shfl_xor_sync(kAll, weights, step);
    u64 blocks = (t.numel + kSquares - 1) / kSquares;
    u32 last = 0;
    if (l == 0 && there) {
        u64* marks = pointer<u64>(a.marks) + 2 * which.x;
        pointer<double>(a.squares)[t.first + which.y] = v;
        atomicAdd(marks, weights);
        if (flawed) atomicOr(marks + 1, 1ull << 63);
        __threadfence();
        last = (atomicAdd(marks + 1, 1ull) & 0x7fffffffffffffffull) == blocks - 1;
        __threadfence();
    }
    __syncwarp();  // shuffles alone order no memory
    for (int half = 0; half < 32; half += 16)
        if (__shfl_sync(kAll, last, half)) finish_level(a, __shfl_sync(kAll, which.x, half));
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
