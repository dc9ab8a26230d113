// The codec noise for NEON, which every 64-bit ARM processor has. Lanes are coded by the plain loops.
#include <arm_neon.h>

#include "noise.h"

namespace gz {
namespace noise {
namespace {
namespace neon {

#include "noise_plain.h"

double squares(const uint8_t* x, int n) {
    if (n % 32) return squares_plain(x, n);
    float64x2_t lane[16];
    for (float64x2_t& l : lane) l = vdupq_n_f64(0);
    for (int i = 0; i < n; i += 32)
        for (int j = 0; j < 8; j++) {
            const float32x4_t four = vld1q_f32(reinterpret_cast<const float*>(x) + i + 4 * j);
            const float64x2_t a = vcvt_f64_f32(vget_low_f32(four)), b = vcvt_high_f64_f32(four);
            lane[2 * j] = vfmaq_f64(lane[2 * j], a, a);  // a square of a float32 is exact, so that this is no other sum
            lane[2 * j + 1] = vfmaq_f64(lane[2 * j + 1], b, b);
        }
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++) lane[j] = vaddq_f64(lane[j], lane[j + half]);
    return vgetq_lane_f64(lane[0], 0) + vgetq_lane_f64(lane[0], 1);
}

uint64_t weights(const int8_t* shape, uint64_t n) {
    // Byte b of 4^j for j = 0 to 12, which is what a shape plus 12 looks up.
    static const uint8_t bytes[4][16] = {{1, 4, 16, 64}, {0, 0, 0, 0, 1, 4, 16, 64}, {0, 0, 0, 0, 0, 0, 0, 0, 1, 4, 16, 64}, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}};
    uint8x16_t table[4];
    for (int b = 0; b < 4; b++) table[b] = vld1q_u8(bytes[b]);
    const int8x16_t deepest = vdupq_n_s8(-12);
    uint64x2_t sum[4] = {};
    uint64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const int8x16_t d = vminq_s8(vmaxq_s8(vld1q_s8(shape + i), deepest), vdupq_n_s8(0));
        const uint8x16_t j = vreinterpretq_u8_s8(vsubq_s8(d, deepest));
        for (int b = 0; b < 4; b++) sum[b] = vpadalq_u32(sum[b], vpaddlq_u16(vpaddlq_u8(vqtbl1q_u8(table[b], j))));
    }
    uint64_t total = weights_plain(shape + i, n - i);
    for (int b = 0; b < 4; b++) total += vaddvq_u64(sum[b]) << (8 * b);
    return total;
}

// x 2^(sign * shape) of 8 values, where that is a normal number.
inline void times_power(float32x4_t x, const int8_t* shape, int sign, float32x4_t* out) {
    const int16x8_t d = vshll_n_s8(vld1_s8(shape), 7);
    const int32x4_t more[2] = {vshll_n_s16(vget_low_s16(d), 16), vshll_n_s16(vget_high_s16(d), 16)}, bits = vreinterpretq_s32_f32(x);
    for (int j = 0; j < 2; j++) out[j] = vreinterpretq_f32_s32(sign < 0 ? vsubq_s32(bits, more[j]) : vaddq_s32(bits, more[j]));
}

inline uint32x4_t mixed(uint32x4_t h) {  // from the first product of the mix on
    h = vmulq_u32(veorq_u32(h, vshrq_n_u32(h, 15)), vdupq_n_u32(kMixAgain));
    return veorq_u32(h, vshrq_n_u32(h, 16));
}

// As in noise_plain.h, in_fixed_point. What is no int32 becomes the nearest one, which is a giant; NaN becomes 0, so it is
// looked for: a sum of products with 0 is NaN if a value is.
template <bool kShaped>
void round_by(const uint8_t* x, int n, const Rounding& how, int at, Work& work) {
    const float32x4_t scale = vdupq_n_f32(how.scale * 0x1p24f);
    const uint32x4_t add = vdupq_n_u32(how.add);
    static const uint32_t numbers[4] = {0, 1, 2, 3};
    for (int i = 0; i < n;) {
        const uint32_t first = how.first + uint32_t(i), left = 0x10000 - (first & 0xffff);
        const int end = int(left < uint32_t(n - i) ? i + int(left) : n), whole = i + (end - i) / 32 * 32;
        const uint32_t folded = how.key ^ (first ^ how.key) >> 16;
        uint32x4_t within[8];
        for (uint32_t j = 0; j < 8; j++)
            within[j] = vmulq_u32(veorq_u32(vaddq_u32(vld1q_u32(numbers), vdupq_n_u32(4 * j)), vdupq_n_u32(folded & 31)), vdupq_n_u32(kMix));
        for (; i < whole; i += 32) {
            if (i % 64 == 0) work.ahead.fetch();
            const uint32x4_t group = vdupq_n_u32((((how.first + uint32_t(i)) ^ folded) & ~31u) * kMix);
            float32x4_t nan = vdupq_n_f32(0);
            int8x16_t bytes[2];
            for (int half = 0; half < 2; half++) {
                uint32x4_t q[4];
                for (int j = 0; j < 4; j++) {
                    const int v = 4 * half + j;
                    float32x4_t by[2] = {scale, scale};
                    if (kShaped) times_power(scale, how.shape + i + 8 * (v / 2), -1, by);
                    const float32x4_t t = vmulq_f32(vld1q_f32(reinterpret_cast<const float*>(x) + i + 4 * v), by[v % 2]);
                    const int32x4_t fixed = vbslq_s32(vcltzq_f32(t), vcvtnq_s32_f32(t), vcvtq_s32_f32(t));
                    nan = vfmaq_f32(nan, t, vdupq_n_f32(0));
                    q[j] = vsraq_n_u32(vreinterpretq_u32_s32(fixed), vaddq_u32(mixed(vaddq_u32(group, within[v])), add), 8);
                }
                const uint16x8_t low = vuzp2q_u16(vreinterpretq_u16_u32(q[0]), vreinterpretq_u16_u32(q[1]));
                const uint16x8_t high = vuzp2q_u16(vreinterpretq_u16_u32(q[2]), vreinterpretq_u16_u32(q[3]));
                bytes[half] = vuzp2q_s8(vreinterpretq_s8_u16(low), vreinterpretq_s8_u16(high));
                vst1q_s8(work.q + at + i + 16 * half, bytes[half]);
            }
            const int8x16_t largest = vmaxq_s8(vqabsq_s8(bytes[0]), vqabsq_s8(bytes[1]));
            const bool giant = vmaxvq_s8(largest) > kNarrowMost || vminvq_u32(vceqq_f32(nan, nan)) == 0;
            if (__builtin_expect(giant, 0)) round_plain(x, i, i + 32, how, at, work);
        }
        if (i < end) round_plain(x, i, end, how, at, work);
        i = end;
    }
}

uint64_t scan(const int8_t* q, int rows, uint64_t* nonzero) {
    uint64x2_t total = vdupq_n_u64(0);
    uint64_t mask = 0;
    for (int r = 0; r < rows; r++) {
        uint16x8_t sum = vdupq_n_u16(0);
        for (int i = 0; i < kRow; i += 16) sum = vpadalq_u8(sum, vreinterpretq_u8_s8(vabsq_s8(vld1q_s8(q + r * kRow + i))));
        total = vpadalq_u32(total, vpaddlq_u16(sum));
        mask |= uint64_t(vmaxvq_u16(sum) != 0) << r;
    }
    *nonzero = mask;
    return vaddvq_u64(total);
}

// A bit for each of 64 bytes that are 0 or 255, that of the first one lowest.
inline uint64_t mask_of(const uint8x16_t* bytes) {
    const uint8x16_t single = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
    const uint8x16_t a = vpaddq_u8(vandq_u8(bytes[0], single), vandq_u8(bytes[1], single));
    const uint8x16_t b = vpaddq_u8(vandq_u8(bytes[2], single), vandq_u8(bytes[3], single));
    const uint8x16_t c = vpaddq_u8(a, b);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(c, c)), 0);
}

template <int kLow>
int pack_by(const int8_t* q, int rows, int reach, uint8_t* pairs, uint8_t* planes, uint8_t* escapes) {
    const uint8x16_t add = vdupq_n_u8(uint8_t((1 << kLow >> 1) + (reach << kLow)));
    const uint8x16_t most = vdupq_n_u8(uint8_t(((2 * reach + 1) << kLow) - 1));
    uint8_t* list = escapes;
    for (int g = 0; g < 2 * rows; g++) {
        uint8x16_t digit[4], out[4], lows[4];
        for (int j = 0; j < 4; j++) {
            const uint8x16_t in = vreinterpretq_u8_s8(vld1q_s8(q + 64 * g + 16 * j)), v = vaddq_u8(in, add);
            out[j] = vcgtq_u8(v, most);
            digit[j] = vbslq_u8(out[j], vdupq_n_u8(kEscape), vshlq_u8(v, vdupq_n_s8(-kLow)));
            lows[j] = vbicq_u8(v, vceqq_u8(in, vdupq_n_u8(uint8_t(kGiant))));  // a giant has low bits of 0
        }
        for (int j = 0; j < 2; j++)
            vst1q_u8(pairs + 32 * g + 16 * j,
                     vsliq_n_u8(vuzp1q_u8(digit[2 * j], digit[2 * j + 1]), vuzp2q_u8(digit[2 * j], digit[2 * j + 1]), 4));
        for (int b = 0; b < kLow; b++) {
            uint8x16_t set[4];
            for (int j = 0; j < 4; j++) set[j] = vtstq_u8(lows[j], vdupq_n_u8(uint8_t(1 << b)));
            store64(planes + (g / 2 * kLow + b) * 16 + g % 2 * 8, mask_of(set));
        }
        list = put_escapes(q + 64 * g, mask_of(out), kLow, list);
    }
    return int(list - escapes);
}

template <int kLow>
int unpack_by(const uint16_t* entries, int rows, int reach, const uint8_t* planes, int8_t* q, uint64_t* escaped) {
    const uint8x16_t less = vdupq_n_u8(uint8_t((1 << kLow >> 1) + (reach << kLow)));
    const uint8x16_t single = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
    int escapes = 0;
    for (int g = 0; g < 2 * rows; g++) {
        uint8x16_t digit[4], out[4];
        for (int j = 0; j < 2; j++) {
            const uint16_t* from = entries + 32 * g + 16 * j;
            const uint8x16_t pair = vuzp2q_u8(vreinterpretq_u8_u16(vld1q_u16(from)), vreinterpretq_u8_u16(vld1q_u16(from + 8)));
            const uint8x16_t even = vandq_u8(pair, vdupq_n_u8(15)), odd = vshrq_n_u8(pair, 4);
            digit[2 * j] = vzip1q_u8(even, odd);
            digit[2 * j + 1] = vzip2q_u8(even, odd);
        }
        for (int j = 0; j < 4; j++) {
            out[j] = vceqq_u8(digit[j], vdupq_n_u8(kEscape));
            uint8x16_t v = vshlq_n_u8(digit[j], kLow);
            for (int b = 0; b < kLow; b++) {
                const uint8_t* plane = planes + (g / 2 * kLow + b) * 16 + g % 2 * 8 + 2 * j;
                const uint8x16_t bits = vcombine_u8(vdup_n_u8(plane[0]), vdup_n_u8(plane[1]));
                v = vorrq_u8(v, vandq_u8(vtstq_u8(bits, single), vdupq_n_u8(uint8_t(1 << b))));
            }
            vst1q_s8(q + 64 * g + 16 * j, vreinterpretq_s8_u8(vsubq_u8(v, less)));
        }
        escaped[g] = mask_of(out);
        escapes += __builtin_popcountll(escaped[g]);
    }
    return escapes;
}

// Decoded values, eight at a time.
template <bool kShaped, Delivery kTo, bool kSquares>
struct Delivering {
    const float32x4_t scale, divisor;
    const int8_t* const shape;
    float* const out;
    Squares* const squares;
    float32x4_t sum[8];
    explicit Delivering(const Target& t)
        : scale(vdupq_n_f32(t.level * t.factor)), divisor(vdupq_n_f32(t.divisor)), shape(t.shape), out(reinterpret_cast<float*>(t.out)),
          squares(t.squares) {
        if (kSquares)
            for (int j = 0; j < 8; j++) sum[j] = vld1q_f32(squares->lane + 4 * j);
    }
    void end() {
        if (kSquares)
            for (int j = 0; j < 8; j++) vst1q_f32(squares->lane + 4 * j, sum[j]);
    }

    template <int kCount>
    inline void some(const int8_t* q, int at) {
        if (kShaped && at % 64 == 0) __builtin_prefetch(shape + at + kAhead, 0, 2);
#pragma GCC unroll 8
        for (int i = 0; i < kCount; i += 8) {
            const int16x8_t wide = vmovl_s8(vld1_s8(q + i));
            const float32x4_t integer[2] = {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
            float32x4_t by[2] = {scale, scale}, power[2];
            if (kShaped) times_power(scale, shape + at + i, 1, by);
            if (kShaped && kSquares) times_power(vdupq_n_f32(1), shape + at + i, 1, power);
            for (int j = 0; j < 2; j++) {
                float* to = out + at + i + 4 * j;
                float32x4_t v = vmulq_f32(integer[j], by[j]);
                if (kSquares) {
                    const float32x4_t u = kShaped ? vmulq_f32(integer[j], power[j]) : integer[j];
                    sum[(i / 4 + j) % 8] = vfmaq_f32(sum[(i / 4 + j) % 8], u, u);
                }
                if (kTo == kAdd) v = vaddq_f32(vld1q_f32(to), v);
                if (kTo == kDivide) v = vdivq_f32(v, divisor);
                vst1q_f32(to, v);
            }
        }
    }
};

#include "noise_vectors.h"

}  // namespace neon
}  // namespace

const Kernels* neon_kernels() {
    static const Kernels kernels{"neon", neon::squares, neon::weights, neon::largest_plain, neon::shape_plain, neon::round, neon::scan, neon::pack, neon::encode_lanes_plain,
                                 neon::decode_lanes, neon::unpack, neon::deliver, neon::accumulate_plain};
    return &kernels;
}

}  // namespace noise
}  // namespace gz
