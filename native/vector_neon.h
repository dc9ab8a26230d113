// Vectors of 32 bytes with NEON, one byte for each lane: the same words as in vector_avx2.h, for AArch64.
#ifndef GRADZIP_VECTOR_NEON_H
#define GRADZIP_VECTOR_NEON_H

#include <arm_neon.h>

#include "byte_orders.h"
#include "layout.h"

namespace gz {
namespace {
namespace neon {

#define GZ_INLINE __attribute__((always_inline)) inline

struct Bytes {
    uint8x16_t v[2];
};
GZ_INLINE Bytes operator&(Bytes a, Bytes b) { return {{vandq_u8(a.v[0], b.v[0]), vandq_u8(a.v[1], b.v[1])}}; }
GZ_INLINE Bytes operator|(Bytes a, Bytes b) { return {{vorrq_u8(a.v[0], b.v[0]), vorrq_u8(a.v[1], b.v[1])}}; }
GZ_INLINE Bytes operator^(Bytes a, Bytes b) { return {{veorq_u8(a.v[0], b.v[0]), veorq_u8(a.v[1], b.v[1])}}; }
GZ_INLINE Bytes operator+(Bytes a, Bytes b) { return {{vaddq_u8(a.v[0], b.v[0]), vaddq_u8(a.v[1], b.v[1])}}; }
GZ_INLINE Bytes operator-(Bytes a, Bytes b) { return {{vsubq_u8(a.v[0], b.v[0]), vsubq_u8(a.v[1], b.v[1])}}; }
GZ_INLINE Bytes load(const void* p) {
    const uint8_t* bytes = static_cast<const uint8_t*>(p);
    return {{vld1q_u8(bytes), vld1q_u8(bytes + 16)}};
}
GZ_INLINE void store(void* p, Bytes a) {
    uint8_t* bytes = static_cast<uint8_t*>(p);
    vst1q_u8(bytes, a.v[0]);
    vst1q_u8(bytes + 16, a.v[1]);
}
GZ_INLINE Bytes splat(int byte) { return {{vdupq_n_u8(uint8_t(byte)), vdupq_n_u8(uint8_t(byte))}}; }
GZ_INLINE Bytes subtract_to_zero(Bytes a, Bytes b) { return {{vqsubq_u8(a.v[0], b.v[0]), vqsubq_u8(a.v[1], b.v[1])}}; }
GZ_INLINE Bytes smaller(Bytes a, Bytes b) { return {{vminq_u8(a.v[0], b.v[0]), vminq_u8(a.v[1], b.v[1])}}; }
GZ_INLINE Bytes larger(Bytes a, Bytes b) { return {{vmaxq_u8(a.v[0], b.v[0]), vmaxq_u8(a.v[1], b.v[1])}}; }
GZ_INLINE Bytes equal(Bytes a, Bytes b) { return {{vceqq_u8(a.v[0], b.v[0]), vceqq_u8(a.v[1], b.v[1])}}; }
GZ_INLINE Bytes without(Bytes a, Bytes mask) { return {{vbicq_u8(a.v[0], mask.v[0]), vbicq_u8(a.v[1], mask.v[1])}}; }
GZ_INLINE Bytes select(Bytes mask, Bytes yes, Bytes no) {
    return {{vbslq_u8(mask.v[0], yes.v[0], no.v[0]), vbslq_u8(mask.v[1], yes.v[1], no.v[1])}};
}
GZ_INLINE bool any(Bytes a) { return vmaxvq_u8(vorrq_u8(a.v[0], a.v[1])) != 0; }
GZ_INLINE Bytes low_nibbles(Bytes a) { return a & splat(15); }
GZ_INLINE Bytes swap_nibbles(Bytes a) {
    return {{vsliq_n_u8(vshrq_n_u8(a.v[0], 4), a.v[0], 4), vsliq_n_u8(vshrq_n_u8(a.v[1], 4), a.v[1], 4)}};
}
GZ_INLINE Bytes top_bits(Bytes a) {  // as masks
    return {{vcltzq_s8(vreinterpretq_s8_u8(a.v[0])), vcltzq_s8(vreinterpretq_s8_u8(a.v[1]))}};
}
GZ_INLINE Bytes halves(Bytes a) { return {{vshrq_n_u8(a.v[0], 1), vshrq_n_u8(a.v[1], 1)}}; }
GZ_INLINE int sum_of(uint8x16_t mask) { return (256 - vaddvq_u8(mask)) & 255; }
GZ_INLINE int count_of(Bytes mask) { return sum_of(vaddq_u8(mask.v[0], mask.v[1])); }

// The first `count` bytes.
GZ_INLINE Bytes first_lanes(int count) {
    static const uint8_t lane[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                     16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    const Bytes number = load(lane), limit = splat(count);
    return {{vcltq_u8(number.v[0], limit.v[0]), vcltq_u8(number.v[1], limit.v[1])}};
}

// --- Look-ups in tables of 16 bytes ---

struct Table {
    uint8x16_t v;
};
GZ_INLINE Table table_of(const uint8_t* bytes) { return {vld1q_u8(bytes)}; }
GZ_INLINE Table table_of(uint8_t a, uint8_t b, uint8_t c, uint8_t d, uint8_t e, uint8_t f, uint8_t g, uint8_t h, uint8_t i) {
    return {uint8x16_t{a, b, c, d, e, f, g, h, i, 0, 0, 0, 0, 0, 0, 0}};
}
// An index for look_up: those above 15 find zeros.
GZ_INLINE Bytes within_16(Bytes index) { return index; }
GZ_INLINE Bytes look_up(Table table, Bytes index) { return {{vqtbl1q_u8(table.v, index.v[0]), vqtbl1q_u8(table.v, index.v[1])}}; }

// --- Chosen bytes ---

// Writes the bytes that are chosen, and up to 8 bytes behind them; returns their end.
GZ_INLINE uint8_t* compress(uint8_t* out, Bytes bytes, Bytes chosen) {
    static const uint8_t bits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t weight = vld1q_u8(bits);
    uint8x16_t sums = vpaddq_u8(vandq_u8(chosen.v[0], weight), vandq_u8(chosen.v[1], weight));
    sums = vpaddq_u8(sums, sums);
    const uint32_t mask = vgetq_lane_u32(vreinterpretq_u32_u8(vpaddq_u8(sums, sums)), 0);
    for (int i = 0; i < 4; i++) {
        const uint8_t eight = uint8_t(mask >> (8 * i));
        const uint8x8_t order = vadd_u8(vcreate_u8(kByteOrders.front[eight]), vdup_n_u8(uint8_t(i % 2 * 8)));
        vst1_u8(out, vqtbl1_u8(bytes.v[i / 2], order));
        out += kByteOrders.count[eight];
    }
    return out;
}
// The reverse: zeros where none is chosen. Reads up to 16 bytes behind the last one.
GZ_INLINE uint8x16_t expand_half(const uint8_t* from, uint8x16_t chosen) {
    const uint8x16_t zero = vdupq_n_u8(0);
    uint8x16_t count = chosen;  // counts down from 0
    count = vaddq_u8(count, vextq_u8(zero, count, 15));
    count = vaddq_u8(count, vextq_u8(zero, count, 14));
    count = vaddq_u8(count, vextq_u8(zero, count, 12));
    count = vaddq_u8(count, vextq_u8(zero, count, 8));
    return vqtbl1q_u8(vld1q_u8(from), vmvnq_u8(vandq_u8(count, chosen)));
}
GZ_INLINE Bytes expand(const uint8_t* from, Bytes chosen) {
    return {{expand_half(from, chosen.v[0]), expand_half(from + sum_of(chosen.v[0]), chosen.v[1])}};
}

// --- Lane states ---

// 32 numbers of 16 bits as two vectors of bytes, because a lane gives and takes whole bytes.
struct States {
    Bytes low, high;
};
GZ_INLINE States load_states(const uint8_t* p) {
    const uint8x16x2_t a = vld2q_u8(p), b = vld2q_u8(p + 32);
    return {{{a.val[0], b.val[0]}}, {{a.val[1], b.val[1]}}};
}
GZ_INLINE void store_states(uint8_t* p, States s) {
    vst2q_u8(p, uint8x16x2_t{{s.low.v[0], s.high.v[0]}});
    vst2q_u8(p + 32, uint8x16x2_t{{s.low.v[1], s.high.v[1]}});
}
// Shifts left by a count of -8 to 8 bits, each a signed byte.
GZ_INLINE States shift(States s, Bytes count) {
    States result;
    for (int h = 0; h < 2; h++) {
        const int8x16_t by = vreinterpretq_s8_u8(count.v[h]);
        const uint16x8_t a = vshlq_u16(vreinterpretq_u16_u8(vzip1q_u8(s.low.v[h], s.high.v[h])), vmovl_s8(vget_low_s8(by)));
        const uint16x8_t b = vshlq_u16(vreinterpretq_u16_u8(vzip2q_u8(s.low.v[h], s.high.v[h])), vmovl_high_s8(by));
        result.low.v[h] = vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
        result.high.v[h] = vuzp2q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
    }
    return result;
}
GZ_INLINE States shift_left(States s, Bytes count) { return shift(s, count); }
// What shift_right wants for a count of 1 to 8. 0 is no shift.
constexpr uint8_t right_shift(int count) { return uint8_t(-count); }
GZ_INLINE Bytes right_shifts(Bytes count) { return splat(0) - count; }
GZ_INLINE States shift_right(States s, Bytes by) { return shift(s, by); }
GZ_INLINE States shift_right_some(States s, Bytes by) { return shift(s, by); }

// --- 32 floats ---

// Byte j of each of them is in byte[j].
struct Planes {
    Bytes byte[4];
};
GZ_INLINE Planes load_planes(const void* values) {
    const uint8_t* p = static_cast<const uint8_t*>(values);
    const uint8x16x4_t a = vld4q_u8(p), b = vld4q_u8(p + 64);
    return {{{{a.val[0], b.val[0]}}, {{a.val[1], b.val[1]}}, {{a.val[2], b.val[2]}}, {{a.val[3], b.val[3]}}}};
}
// 16 values of 32 bits from the bytes of half h, 4 in each vector.
GZ_INLINE void join_half(const Planes& p, int h, uint32x4_t v[4]) {
    const uint16x8_t low01 = vreinterpretq_u16_u8(vzip1q_u8(p.byte[0].v[h], p.byte[1].v[h]));
    const uint16x8_t high01 = vreinterpretq_u16_u8(vzip2q_u8(p.byte[0].v[h], p.byte[1].v[h]));
    const uint16x8_t low23 = vreinterpretq_u16_u8(vzip1q_u8(p.byte[2].v[h], p.byte[3].v[h]));
    const uint16x8_t high23 = vreinterpretq_u16_u8(vzip2q_u8(p.byte[2].v[h], p.byte[3].v[h]));
    v[0] = vreinterpretq_u32_u16(vzip1q_u16(low01, low23));
    v[1] = vreinterpretq_u32_u16(vzip2q_u16(low01, low23));
    v[2] = vreinterpretq_u32_u16(vzip1q_u16(high01, high23));
    v[3] = vreinterpretq_u32_u16(vzip2q_u16(high01, high23));
}
GZ_INLINE void transpose_half(const uint32x4_t v[4], Planes& p, int h) {
    uint8x16_t low[2], high[2];
    for (int k = 0; k < 2; k++) {
        const uint16x8_t a = vreinterpretq_u16_u32(v[2 * k]), b = vreinterpretq_u16_u32(v[2 * k + 1]);
        low[k] = vreinterpretq_u8_u16(vuzp1q_u16(a, b));
        high[k] = vreinterpretq_u8_u16(vuzp2q_u16(a, b));
    }
    p.byte[0].v[h] = vuzp1q_u8(low[0], low[1]);
    p.byte[1].v[h] = vuzp2q_u8(low[0], low[1]);
    p.byte[2].v[h] = vuzp1q_u8(high[0], high[1]);
    p.byte[3].v[h] = vuzp2q_u8(high[0], high[1]);
}
constexpr int kStreamAlignment = 1;
GZ_INLINE void store_floats(const Target& target, int i, uint32x4_t v) {
    float* to = static_cast<float*>(target.out) + i;
    if (target.add) {
        const float32x4_t there = vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(to)));
        const float32x4_t sum = vaddq_f32(there, vreinterpretq_f32_u32(v));
        v = vbslq_u32(vceqq_f32(sum, sum), vreinterpretq_u32_f32(sum), vdupq_n_u32(0x7fc00000));
    }
    vst1q_u8(reinterpret_cast<uint8_t*>(to), vreinterpretq_u8_u32(v));
}
GZ_INLINE void store_planes(const Target& target, int i, const Planes& p) {
    for (int h = 0; h < 2; h++) {
        uint32x4_t v[4];
        join_half(p, h, v);
        for (int k = 0; k < 4; k++) store_floats(target, i + 16 * h + 4 * k, v[k]);
    }
}
// There are no stores that bypass the cache.
GZ_INLINE void stream_bytes(uint8_t* to, Bytes bytes) { store(to, bytes); }

// --- Near mode ---

// Rounding must not depend on what the caller made of the control register; subnormals have to count as zeros.
struct FloatMode {
    uint64_t before;
    FloatMode() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before));
        __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t(1) << 24) : "memory");  // to nearest even, subnormals are zeros
    }
    ~FloatMode() { __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory"); }
};

// Bytes 4 k to 4 k + 3 of a half as double words.
GZ_INLINE uint32x4_t quarter(uint8x16_t bytes, int k) {
    const uint8x16_t first = {0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3, 255, 255, 255};
    const uint8x16_t index = vqaddq_u8(first, vdupq_n_u8(uint8_t(4 * k)));
    return vreinterpretq_u32_u8(vqtbl1q_u8(bytes, index));
}
// Adding and subtracting C = 2^(f+23) rounds |x| < C to a multiple of 2^f, ties to even; larger |x| are on the grid
// already, and so are values with C = 0. Subnormals may be left as they are.
GZ_INLINE uint32x4_t round_magnitudes(uint32x4_t magnitude, uint32x4_t grid) {
    const uint32x4_t c = vshlq_n_u32(grid, 23);
    const float32x4_t there = vreinterpretq_f32_u32(c), sum = vaddq_f32(vreinterpretq_f32_u32(magnitude), there);
    return vbslq_u32(vcltq_u32(magnitude, c), vreinterpretq_u32_f32(vsubq_f32(sum, there)), magnitude);
}
GZ_INLINE uint32x4_t load_words(const uint32_t* x) { return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(x))); }

// 32 values on their grids, which are floors + 150, or 0 where values stay exact: lane parts in bytes 0 to 2, exponents in
// byte 3. Lane parts of values with exponent 0 mean nothing.
GZ_INLINE Planes near_parts(const uint32_t* x, Bytes grids) {
    Planes result;
    for (int h = 0; h < 2; h++) {
        uint32x4_t v[4];
        for (int k = 0; k < 4; k++) {
            const uint32x4_t u = load_words(x + 16 * h + 4 * k), grid = quarter(grids.v[h], k);
            const uint32x4_t q = round_magnitudes(vbicq_u32(u, vdupq_n_u32(0x80000000u)), grid), e = vshrq_n_u32(q, 23);
            const uint32x4_t cut = vminq_u32(vqsubq_u32(grid, e), vdupq_n_u32(31));
            const uint32x4_t field = vbslq_u32(vdupq_n_u32(0x7fffff), q, vandq_u32(vshrq_n_u32(u, 8), vdupq_n_u32(0x800000)));
            v[k] = vsliq_n_u32(vshlq_u32(field, vnegq_s32(vreinterpretq_s32_u32(cut))), e, 24);
        }
        transpose_half(v, result, h);
    }
    return result;
}
// 32 rounded values, with +0 for what has exponent 0.
GZ_INLINE void store_rounded(uint32_t* q, const uint32_t* x, Bytes grids) {
    for (int i = 0; i < kLanes; i += 4) {
        const uint32x4_t u = load_words(x + i), sign = vdupq_n_u32(0x80000000u);
        const uint32x4_t rounded = round_magnitudes(vbicq_u32(u, sign), quarter(grids.v[i / 16], i / 4 % 4));
        vst1q_u32(q + i, vandq_u32(vbslq_u32(sign, u, rounded), vcgtq_u32(rounded, vdupq_n_u32(0x7fffff))));
    }
}
// The reverse of near_parts: `width` is the number of bits of each lane part.
GZ_INLINE void store_near(const Target& target, int i, const Bytes part[3], Bytes width, Bytes exponent) {
    const Planes p{{part[0], part[1], part[2], splat(0)}};
    const Bytes up = splat(32) - width;
    for (int h = 0; h < 2; h++) {
        uint32x4_t v[4];
        join_half(p, h, v);
        for (int k = 0; k < 4; k++) {
            // The sign becomes the top bit; no bits at all become 0.
            const uint32x4_t field = vshlq_u32(v[k], vreinterpretq_s32_u32(quarter(up.v[h], k)));
            const uint32x4_t mantissa = vshrq_n_u32(vaddq_u32(field, field), 9);
            const uint32x4_t magnitude = vorrq_u32(mantissa, vshlq_n_u32(quarter(exponent.v[h], k), 23));
            store_floats(target, i + 16 * h + 4 * k, vbslq_u32(vdupq_n_u32(0x80000000u), field, magnitude));
        }
    }
}
// The floors of 32 values before the shift, clamped to -128 to 127. The constants fit 14 bits.
GZ_INLINE Bytes floors_by_rule(const float* theta, const float* second, int c0, int c1, int c2) {
    auto exponents = [](const float* from) {
        const Planes p = load_planes(from);
        return p.byte[3] + p.byte[3] - top_bits(p.byte[2]);
    };
    const Bytes e = exponents(theta), v = second ? exponents(second) : e;
    Bytes result;
    for (int h = 0; h < 2; h++) {
        auto floor = [&](uint8x8_t theta_exponent, uint8x8_t second_exponent) {
            int16x8_t f = vaddq_s16(vreinterpretq_s16_u16(vmovl_u8(theta_exponent)), vdupq_n_s16(int16_t(c0)));
            if (second) {
                const int16x8_t moved = vaddq_s16(vreinterpretq_s16_u16(vmovl_u8(second_exponent)), vdupq_n_s16(int16_t(c1)));
                f = vaddq_s16(f, vshrq_n_s16(vmaxq_s16(moved, vdupq_n_s16(int16_t(c2))), 1));
            }
            return vqmovn_s16(f);
        };
        const int8x16_t f = vcombine_s8(floor(vget_low_u8(e.v[h]), vget_low_u8(v.v[h])), floor(vget_high_u8(e.v[h]), vget_high_u8(v.v[h])));
        result.v[h] = vbslq_u8(vceqzq_u8(e.v[h]), vdupq_n_u8(uint8_t(kExact)), vreinterpretq_u8_s8(f));
    }
    return result;
}
GZ_INLINE Bytes add_signed(Bytes a, Bytes b) {
    auto add = [](uint8x16_t x, uint8x16_t y) { return vreinterpretq_u8_s8(vqaddq_s8(vreinterpretq_s8_u8(x), vreinterpretq_s8_u8(y))); };
    return {{add(a.v[0], b.v[0]), add(a.v[1], b.v[1])}};
}
GZ_INLINE Bytes smaller_signed(Bytes a, Bytes b) {
    auto least = [](uint8x16_t x, uint8x16_t y) { return vreinterpretq_u8_s8(vminq_s8(vreinterpretq_s8_u8(x), vreinterpretq_s8_u8(y))); };
    return {{least(a.v[0], b.v[0]), least(a.v[1], b.v[1])}};
}

}  // namespace neon
}  // namespace
}  // namespace gz
#endif
