// What all kernels build on: types, what the host passes in, votes and sums within a warp, bits of floats.
//
// One warp codes one block, a thread being a lane of docs/format.md. Arithmetic is on integers, with two exceptions that
// IEEE 754 defines exactly: rounding to a grid in values.cuh, and the sum that the decoder may form.
// The files here are compiled as one, in the order that driver.py gives, by NVRTC; by a C++ compiler under test (tests/emulator).

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__

#if defined(__CUDACC_RTC__)
extern __shared__ __align__(16) u8 dynamic_shared[];
#endif

constexpr u32 kAll = 0xffffffffu;
constexpr int kBlock = 4096, kSegmentBlocks = 32;
constexpr u32 kCodeStride = 260;  // words per segment in the encoder's table: 257 entries of entry_of
constexpr int kExact = -256;      // the floor of values that stay exact; so low that no test needs it
constexpr int kCoarsest = 103;    // the highest floor: up to here 2^(f+23) + x stays finite
constexpr u32 kSlotBytes = 32768; // scratch memory: a block before its place is known, or two lists

enum { kRaw = 0, kDense = 1, kSparse = 2 };
enum { kFixed = 0, kNear = 1, kPaper = 2 };                                 // codings
enum { kNoFloor = 0, kInt8Floor = 1, kThetaFloor = 2, kSecondFloor = 3 };   // where floors come from

// Status bits; the host has a message for each.
enum {
    kBadTable = 1 << 0,
    kBadHead = 1 << 1,
    kBadIndexPadding = 1 << 2,
    kShortBody = 1 << 4,
    kLongBody = 1 << 5,
    kBadKind = 1 << 6,
    kBadRaw = 1 << 7,
    kShortDense = 1 << 8,
    kBadDenseHead = 1 << 9,
    kBadLanes = 1 << 10,
    kBadFields = 1 << 11,
    kBadSparse = 1 << 12,
    kStraySparse = 1 << 13,
    kOtherCoding = 1 << 14,  // + coding in bits 16 and 17
};

// One tensor of a launch. launch.py packs the same fields.
struct Tensor {
    u64 values;    // what is encoded, or where decoded values go
    u64 addend;    // decoder: what is added to the values; 0: nothing
    u64 floors;    // int8 floors, or parameters; 0: none
    u64 second;    // the optimizer's second moments
    u64 body;
    u64 lengths;   // code lengths to use, [segments][256] bytes; 0: sample, or see `tables`
    u64 tables;    // encoder: a body whose tables to use; 0: none
    u64 numel;
    u64 body_bytes;
    int c0, c1, c2;
    u32 first_group, first_segment;  // where its blocks (decoder: groups of blocks) and segments begin among those of all
    u32 padding;
};

constexpr int kMaxTensors = 16;

struct Args {
    u64 codes;      // u32[segments][kCodeStride], or the decoder's lookup tables u32[segments][256]
    u64 progress;   // u64[groups]: how far the sums of block lengths are known, for the encoder
    u64 ticket;     // u32; small.cuh: u32[2], those that were taken and those that are done
    u64 slots;      // kSlotBytes per warp
    u64 status;     // u32
    u64 told;       // what the host is told, in its memory: u64 per tensor, and one of the decoder
    u64 words;      // u32 per segment: the words that its blocks take
    u64 counts;     // int32[segments][256]: histograms wanted, and nothing else; 0: not
    int tensors;
    int groups;     // encoder: blocks; decoder: groups of blocks
    int segments, coding, book, shift, limit;
    int small;      // whether all input fits into the L2 cache, so that blocks may be fetched as a whole
    int keep, cut, up, odd, mask;
    u32 epoch;      // which launch this is
    u32 served;     // for the kernels of small.cuh: how many tickets earlier launches took
    u32 padding;
    Tensor tensor[kMaxTensors];
};

// --- What the host is told -----------------------------------------------------------------------------------------
// Words that carry the launch's number, so that the host sees when they are there. It looks at them while kernels still
// run: what it starts next on this stream waits for them anyway.

constexpr u32 kSizeBits = 40;  // then a bit that tells of a status, then the epoch

DEVICE void tell_size(const Args& a, int tensor, u64 size) {
    u64 flawed = *(volatile u32*)a.status != 0;
    ((volatile u64*)a.told)[tensor] = (u64)a.epoch << (kSizeBits + 1) | flawed << kSizeBits | size;
}
DEVICE void tell_status(const Args& a) {
    ((volatile u64*)a.told)[kMaxTensors] = (u64)a.epoch << 32 | *(volatile u32*)a.status;
}

// --- Warps ---------------------------------------------------------------------------------------------------------

DEVICE u32 lane_id() { return threadIdx.x & 31; }
// The warp's number, or a value that is equal in all lanes, in a way that the compiler knows it, too: it then omits what
// guards votes against lanes gone astray.
DEVICE u32 uniform(u32 v) { return __shfl_sync(kAll, v, 0); }
DEVICE u32 warp_id() { return uniform(threadIdx.x >> 5); }
DEVICE u32 lower_lanes() { return (1u << lane_id()) - 1; }
DEVICE bool any(bool flag) { return __any_sync(kAll, flag); }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
DEVICE u32 sum(u32 v) { return __reduce_add_sync(kAll, v); }
DEVICE u32 or_of(u32 v) { return __reduce_or_sync(kAll, v); }
#else
DEVICE u32 sum(u32 v) {
    for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(kAll, v, step);
    return v;
}
DEVICE u32 or_of(u32 v) {
    for (int step = 16; step; step >>= 1) v |= __shfl_xor_sync(kAll, v, step);
    return v;
}
#endif

// The sum over this and the lower lanes.
DEVICE u32 running_sum(u32 v) {
    for (u32 step = 1; step < 32; step <<= 1) {
        u32 below = __shfl_up_sync(kAll, v, step);
        if (lane_id() >= step) v += below;
    }
    return v;
}

// --- Floats --------------------------------------------------------------------------------------------------------

struct Float32 {
    typedef u32 Bits;
    static constexpr int kItem = 4, kExponent = 8, kField = 24;
};
struct BFloat16 {
    typedef u16 Bits;
    static constexpr int kItem = 2, kExponent = 8, kField = 8;
};
struct Float16 {
    typedef u16 Bits;
    static constexpr int kItem = 2, kExponent = 5, kField = 11;
};

// The bits of `a` where `mask` is set, else those of `b`.
DEVICE u32 choose(u32 mask, u32 a, u32 b) {
#if defined(__CUDA_ARCH__)
    u32 both;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(both) : "r"(mask), "r"(a), "r"(b));
    return both;
#else
    return (a & mask) | (b & ~mask);
#endif
}

template <class F>
DEVICE u32 exponent_of(u32 bits) { return (bits >> (F::kField - 1)) & ((1u << F::kExponent) - 1); }

// Sign and mantissa, side by side.
template <class F>
DEVICE u32 field_of(u32 bits) {
    return ((bits >> F::kExponent) & (1u << (F::kField - 1))) | (bits & ((1u << (F::kField - 1)) - 1));
}

template <class F>
DEVICE u32 join(u32 exponent, u32 field) {
    constexpr u32 mantissa = (1u << (F::kField - 1)) - 1;
    return ((field & ~mantissa) << F::kExponent) | (exponent << (F::kField - 1)) | (field & mantissa);
}

template <class F>
struct Sum;
template <>
struct Sum<Float32> {
    DEVICE u32 of(u32 a, u32 b) {
        u32 s = __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(b)));
        return (s & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : s;  // one NaN for all sums (docs/format.md)
    }
};
template <>
struct Sum<BFloat16> {
    DEVICE u32 of(u32 a, u32 b) {
        u32 s = Sum<Float32>::of(a << 16, b << 16);
        if ((s & 0x7fffffff) > 0x7f800000) return 0x7fc0;
        return (s + 0x7fff + ((s >> 16) & 1)) >> 16;
    }
};
template <>
struct Sum<Float16> {
    DEVICE u32 of(u32 a, u32 b) {
        u32 s = half_bits(__fadd_rn(half_value(a), half_value(b)));
        return (s & 0x7fff) > 0x7c00 ? 0x7e00 : s;
    }
    DEVICE float half_value(u32 bits) {
#if defined(__CUDA_ARCH__)
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)bits));
        return value;
#else
        return emulated_half_value((u16)bits);
#endif
    }
    DEVICE u32 half_bits(float value) {
#if defined(__CUDA_ARCH__)
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
#else
        return emulated_half_bits(value);
#endif
    }
};

// --- Layout of a body ----------------------------------------------------------------------------------------------

DEVICE u64 blocks_of(u64 numel) { return (numel + kBlock - 1) / kBlock; }
DEVICE u64 segments_of(u64 numel) { return (numel + kBlock * kSegmentBlocks - 1) / (kBlock * kSegmentBlocks); }
DEVICE u64 index_offset(u64 numel, bool book) { return 8 + (book ? 0 : 128 * segments_of(numel)); }
DEVICE u64 blocks_offset(u64 numel, bool book) { return index_offset(numel, book) + (2 * blocks_of(numel) + 3) / 4 * 4; }

// In the block that begins with value `start`.
DEVICE int values_in(const Tensor& t, u64 start) { return (int)(t.numel - start < kBlock ? t.numel - start : kBlock); }

// In a loop that waits for another warp.
DEVICE void let_others_run() {
#if defined(__CUDA_ARCH__)
    __nanosleep(20);
#else
    emulator::yield();
#endif
}

// Has the line of memory brought to the L2 cache.
DEVICE void prefetch(const void* line) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#else
    (void)line;
#endif
}

// The same for all lines of a stretch, by all threads of a warp.
DEVICE void prefetch_stretch(const void* from, u32 bytes) {
    for (u32 at = 128 * lane_id(); at < bytes; at += 128 * 32) prefetch((const u8*)from + at);
}

// Copies 16 bytes to shared memory, without waiting.
DEVICE void copy_async(void* to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from));
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}
DEVICE void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncwarp();
}

template <class T>
DEVICE T* pointer(u64 address) { return (T*)address; }

DEVICE int tensor_of_group(const Args& a, u32 group) {
    int t = 0;
    while (t + 1 < a.tensors && a.tensor[t + 1].first_group <= group) t++;
    return t;
}
DEVICE int tensor_of_segment(const Args& a, u32 segment) {
    int t = 0;
    while (t + 1 < a.tensors && a.tensor[t + 1].first_segment <= segment) t++;
    return t;
}

DEVICE u32 symbol_of(u32 e, u32 base) { return e == 0 ? 0 : (e - base - (e <= base)) & 255; }

DEVICE u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }
DEVICE int min_int(int a, int b) { return a < b ? a : b; }
DEVICE int max_int(int a, int b) { return a > b ? a : b; }
