// Vectors of 32 bytes with AVX2, one byte for each lane: what lanes_vector.h and values_vector.h are written in.
#ifndef GRADZIP_VECTOR_AVX2_H
#define GRADZIP_VECTOR_AVX2_H

#include <immintrin.h>

#include "byte_orders.h"
#include "layout.h"

namespace gz {
namespace {
namespace avx2 {

#define GZ_INLINE __attribute__((always_inline)) inline

struct Bytes {
    __m256i v;
};
GZ_INLINE Bytes operator&(Bytes a, Bytes b) { return {_mm256_and_si256(a.v, b.v)}; }
GZ_INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm256_or_si256(a.v, b.v)}; }
GZ_INLINE Bytes operator^(Bytes a, Bytes b) { return {_mm256_xor_si256(a.v, b.v)}; }
GZ_INLINE Bytes operator+(Bytes a, Bytes b) { return {_mm256_add_epi8(a.v, b.v)}; }
GZ_INLINE Bytes operator-(Bytes a, Bytes b) { return {_mm256_sub_epi8(a.v, b.v)}; }
GZ_INLINE Bytes load(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
GZ_INLINE void store(void* p, Bytes a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a.v); }
GZ_INLINE Bytes splat(int byte) { return {_mm256_set1_epi8(char(byte))}; }
GZ_INLINE Bytes subtract_to_zero(Bytes a, Bytes b) { return {_mm256_subs_epu8(a.v, b.v)}; }
GZ_INLINE Bytes smaller(Bytes a, Bytes b) { return {_mm256_min_epu8(a.v, b.v)}; }
GZ_INLINE Bytes larger(Bytes a, Bytes b) { return {_mm256_max_epu8(a.v, b.v)}; }
GZ_INLINE Bytes equal(Bytes a, Bytes b) { return {_mm256_cmpeq_epi8(a.v, b.v)}; }
GZ_INLINE Bytes without(Bytes a, Bytes mask) { return {_mm256_andnot_si256(mask.v, a.v)}; }
GZ_INLINE Bytes select(Bytes mask, Bytes yes, Bytes no) { return {_mm256_blendv_epi8(no.v, yes.v, mask.v)}; }
GZ_INLINE bool any(Bytes a) { return !_mm256_testz_si256(a.v, a.v); }
GZ_INLINE uint32_t bits_of(Bytes mask) { return uint32_t(_mm256_movemask_epi8(mask.v)); }
GZ_INLINE int count_of(Bytes mask) { return _mm_popcnt_u32(bits_of(mask)); }
GZ_INLINE Bytes low_nibbles(Bytes a) { return a & splat(15); }
GZ_INLINE Bytes swap_nibbles(Bytes a) {
    return low_nibbles({_mm256_srli_epi16(a.v, 4)}) | Bytes{_mm256_slli_epi16(low_nibbles(a).v, 4)};
}
GZ_INLINE Bytes top_bits(Bytes a) { return {_mm256_cmpgt_epi8(_mm256_setzero_si256(), a.v)}; }  // as masks
GZ_INLINE Bytes halves(Bytes a) { return Bytes{_mm256_srli_epi16(a.v, 1)} & splat(127); }

// The first `count` bytes.
GZ_INLINE Bytes first_lanes(int count) {
    const __m256i lane = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24,
                                          25, 26, 27, 28, 29, 30, 31);
    return {_mm256_cmpgt_epi8(_mm256_set1_epi8(char(count)), lane)};
}

// --- Look-ups in tables of 16 bytes ---

struct Table {
    __m256i v;
};
GZ_INLINE Table table_of(const uint8_t* bytes) {
    return {_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)))};
}
// An index for look_up: those above 15 find zeros.
GZ_INLINE Bytes within_16(Bytes index) { return {_mm256_adds_epu8(index.v, splat(0x70).v)}; }
GZ_INLINE Bytes look_up(Table table, Bytes index) { return {_mm256_shuffle_epi8(table.v, index.v)}; }
GZ_INLINE Table table_of(uint8_t a, uint8_t b, uint8_t c, uint8_t d, uint8_t e, uint8_t f, uint8_t g, uint8_t h, uint8_t i) {
    return {_mm256_broadcastsi128_si256(_mm_setr_epi8(char(a), char(b), char(c), char(d), char(e), char(f), char(g), char(h), char(i), 0, 0, 0, 0, 0, 0, 0))};
}

// --- Chosen bytes ---

GZ_INLINE __m256i load_quarters(const uint8_t* a, const uint8_t* b) {
    const __m128i* low = reinterpret_cast<const __m128i*>(a);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1);
}
// Writes the bytes that are chosen, and up to 8 bytes behind them; returns their end.
GZ_INLINE uint8_t* compress(uint8_t* out, Bytes bytes, Bytes chosen) {
    const uint32_t mask = bits_of(chosen);
    auto pair = [](uint32_t two) {
        const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kByteOrders.front + (two & 255)));
        return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(first), reinterpret_cast<const __m64*>(kByteOrders.front + (two >> 8 & 255))));
    };
    const __m256i orders = _mm256_inserti128_si256(_mm256_castsi128_si256(pair(mask & 0xffff)), pair(mask >> 16), 1);
    const __m256i order = _mm256_add_epi8(orders, _mm256_setr_epi64x(0, 0x0808080808080808, 0, 0x0808080808080808));
    const __m256i packed = _mm256_shuffle_epi8(bytes.v, order);
    const __m128 low = _mm_castsi128_ps(_mm256_castsi256_si128(packed)), high = _mm_castsi128_ps(_mm256_extracti128_si256(packed, 1));
    _mm_storel_pi(reinterpret_cast<__m64*>(out), low);
    _mm_storeh_pi(reinterpret_cast<__m64*>(out + _mm_popcnt_u32(mask & 0xff)), low);
    _mm_storel_pi(reinterpret_cast<__m64*>(out + _mm_popcnt_u32(mask & 0xffff)), high);
    _mm_storeh_pi(reinterpret_cast<__m64*>(out + _mm_popcnt_u32(mask & 0xffffff)), high);
    return out + _mm_popcnt_u32(mask);
}
// The reverse: zeros where none is chosen. Reads up to 16 bytes behind the last one.
GZ_INLINE Bytes expand(const uint8_t* from, Bytes chosen) {
    __m256i count = chosen.v;  // counts down from 0 in each half
    count = _mm256_add_epi8(count, _mm256_slli_si256(count, 1));
    count = _mm256_add_epi8(count, _mm256_slli_si256(count, 2));
    count = _mm256_add_epi8(count, _mm256_slli_si256(count, 4));
    count = _mm256_add_epi8(count, _mm256_slli_si256(count, 8));
    const Bytes order = (Bytes{count} & chosen) ^ splat(255);
    return {_mm256_shuffle_epi8(load_quarters(from, from + _mm_popcnt_u32(bits_of(chosen) & 0xffff)), order.v)};
}

// --- Lane states ---

// 32 numbers of 16 bits as two vectors of bytes, because a lane gives and takes whole bytes.
struct States {
    Bytes low, high;
};
GZ_INLINE States narrow(__m256i a, __m256i b) {
    const __m256i low = _mm256_set1_epi16(255);
    return {{_mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low))},
            {_mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8))}};
}
GZ_INLINE States load_states(const uint8_t* p) {
    const __m256i a = load(p).v, b = load(p + 32).v;
    return narrow(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}
GZ_INLINE void store_states(uint8_t* p, States s) {
    const __m256i a = _mm256_unpacklo_epi8(s.low.v, s.high.v), b = _mm256_unpackhi_epi8(s.low.v, s.high.v);
    store(p, {_mm256_permute2x128_si256(a, b, 0x20)});
    store(p + 32, {_mm256_permute2x128_si256(a, b, 0x31)});
}
// Shifts left by 0 to 8 bits: a multiplication, because there are no shifts of 16 bits by a count for each lane.
GZ_INLINE States shift_left(States s, Bytes count) {
    const Bytes low = look_up(table_of(1, 2, 4, 8, 16, 32, 64, 128, 0), count);
    const Bytes high = look_up(table_of(0, 0, 0, 0, 0, 0, 0, 0, 1), count);
    return narrow(_mm256_mullo_epi16(_mm256_unpacklo_epi8(s.low.v, s.high.v), _mm256_unpacklo_epi8(low.v, high.v)),
                  _mm256_mullo_epi16(_mm256_unpackhi_epi8(s.low.v, s.high.v), _mm256_unpackhi_epi8(low.v, high.v)));
}
// What shift_right wants for a count of 1 to 8: a factor whose product has the result in its upper half. 0 is no shift.
constexpr uint8_t right_shift(int count) { return uint8_t(1 << (8 - count)); }
GZ_INLINE Bytes right_shifts(Bytes count) { return look_up(table_of(0, 128, 64, 32, 16, 8, 4, 2, 1), count); }
GZ_INLINE States shift_right(States s, Bytes shift) {
    const __m256i zero = _mm256_setzero_si256();
    return narrow(_mm256_mulhi_epu16(_mm256_unpacklo_epi8(s.low.v, s.high.v), _mm256_unpacklo_epi8(zero, shift.v)),
                  _mm256_mulhi_epu16(_mm256_unpackhi_epi8(s.low.v, s.high.v), _mm256_unpackhi_epi8(zero, shift.v)));
}
GZ_INLINE States shift_right_some(States s, Bytes shift) {
    const Bytes still = equal(shift, splat(0));
    const States moved = shift_right(s, shift);
    return {select(still, s.low, moved.low), select(still, s.high, moved.high)};
}

// --- 32 floats ---

// Byte j of each of them is in byte[j].
struct Planes {
    Bytes byte[4];
};
GZ_INLINE Planes transpose(const __m256i v[4]) {  // value i is in v[i / 4 % 4], in its half i / 16
    const __m256i gather = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m256i s[4];
    for (int k = 0; k < 4; k++) s[k] = _mm256_shuffle_epi8(v[k], gather);
    const __m256i a = _mm256_unpacklo_epi32(s[0], s[1]), b = _mm256_unpacklo_epi32(s[2], s[3]);
    const __m256i c = _mm256_unpackhi_epi32(s[0], s[1]), d = _mm256_unpackhi_epi32(s[2], s[3]);
    return {{{_mm256_unpacklo_epi64(a, b)}, {_mm256_unpackhi_epi64(a, b)}, {_mm256_unpacklo_epi64(c, d)}, {_mm256_unpackhi_epi64(c, d)}}};
}
GZ_INLINE Planes load_planes(const void* values) {
    const uint8_t* p = static_cast<const uint8_t*>(values);
    __m256i v[4];
    for (int k = 0; k < 4; k++) v[k] = load_quarters(p + 16 * k, p + 64 + 16 * k);
    return transpose(v);
}
// The reverse: v[k] holds the values 8 k to 8 k + 7.
GZ_INLINE void join_planes(const Planes& p, __m256i v[4]) {
    const __m256i low01 = _mm256_unpacklo_epi8(p.byte[0].v, p.byte[1].v), high01 = _mm256_unpackhi_epi8(p.byte[0].v, p.byte[1].v);
    const __m256i low23 = _mm256_unpacklo_epi8(p.byte[2].v, p.byte[3].v), high23 = _mm256_unpackhi_epi8(p.byte[2].v, p.byte[3].v);
    const __m256i a = _mm256_unpacklo_epi16(low01, low23), b = _mm256_unpackhi_epi16(low01, low23);
    const __m256i c = _mm256_unpacklo_epi16(high01, high23), d = _mm256_unpackhi_epi16(high01, high23);
    v[0] = _mm256_permute2x128_si256(a, b, 0x20);
    v[1] = _mm256_permute2x128_si256(c, d, 0x20);
    v[2] = _mm256_permute2x128_si256(a, b, 0x31);
    v[3] = _mm256_permute2x128_si256(c, d, 0x31);
}
constexpr int kStreamAlignment = 32;
GZ_INLINE void store_floats(const Target& target, int i, __m256i v) {
    float* to = static_cast<float*>(target.out) + i;
    if (target.add) {
        const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(to), _mm256_castsi256_ps(v));
        const __m256 nan = _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q);
        _mm256_storeu_ps(to, _mm256_blendv_ps(sum, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan));
    } else if (target.stream)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), v);
    else
        store(to, {v});
}
GZ_INLINE void store_planes(const Target& target, int i, const Planes& p) {
    __m256i v[4];
    join_planes(p, v);
    for (int k = 0; k < 4; k++) store_floats(target, i + 8 * k, v[k]);
}
// 32 bytes of an output that will not be read soon; `to` is aligned.
GZ_INLINE void stream_bytes(uint8_t* to, Bytes bytes) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bytes.v); }

// --- Near mode ---

// Rounding must not depend on what the caller made of the control register; subnormals have to count as zeros.
struct FloatMode {
    unsigned before = _mm_getcsr();
    FloatMode() { _mm_setcsr(0x1fc0); }  // exceptions masked, to nearest even, subnormal operands are zeros
    ~FloatMode() { _mm_setcsr(before); }
};

// The bytes of 8 values as double words; k as in transpose().
GZ_INLINE __m256i quarter(Bytes bytes, int k) {
    const __m256i first = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -128, -128, -128, 1, -128, -128, -128, 2, -128, -128, -128, 3, -128, -128, -128));
    return _mm256_shuffle_epi8(bytes.v, _mm256_add_epi32(first, _mm256_set1_epi32(4 * k)));
}
// Adding and subtracting C = 2^(f+23) rounds |x| < C to a multiple of 2^f, ties to even; larger |x| are on the grid
// already, and so are values with C = 0. Subnormals may be left as they are.
GZ_INLINE __m256i round_magnitudes(__m256i magnitude, __m256i grid) {
    const __m256i c = _mm256_slli_epi32(grid, 23);
    const __m256 there = _mm256_castsi256_ps(c), sum = _mm256_add_ps(_mm256_castsi256_ps(magnitude), there);
    return _mm256_blendv_epi8(magnitude, _mm256_castps_si256(_mm256_sub_ps(sum, there)), _mm256_cmpgt_epi32(c, magnitude));
}
// 32 values on their grids, which are floors + 150, or 0 where values stay exact: lane parts in bytes 0 to 2, exponents in
// byte 3. Lane parts of values with exponent 0 mean nothing.
GZ_INLINE Planes near_parts(const uint32_t* x, Bytes grids) {
    const uint8_t* p = reinterpret_cast<const uint8_t*>(x);
    __m256i v[4];
    for (int k = 0; k < 4; k++) {
        const __m256i u = load_quarters(p + 16 * k, p + 64 + 16 * k), grid = quarter(grids, k);
        const __m256i q = round_magnitudes(_mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff)), grid), e = _mm256_srli_epi32(q, 23);
        const __m256i cut = _mm256_max_epi32(_mm256_sub_epi32(grid, e), _mm256_setzero_si256());
        const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(u, 8), _mm256_set1_epi32(0x800000));
        const __m256i field = _mm256_or_si256(_mm256_and_si256(q, _mm256_set1_epi32(0x7fffff)), sign);
        v[k] = _mm256_or_si256(_mm256_srlv_epi32(field, cut), _mm256_slli_epi32(e, 24));
    }
    return transpose(v);
}
// 32 rounded values, with +0 for what has exponent 0.
GZ_INLINE void store_rounded(uint32_t* q, const uint32_t* x, Bytes grids) {
    alignas(32) uint8_t grid[kLanes];
    store(grid, grids);
    for (int i = 0; i < kLanes; i += 8) {
        const __m256i u = load(x + i).v, magnitude = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
        const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(grid + i)));
        const __m256i rounded = round_magnitudes(magnitude, wide);
        const __m256i normal = _mm256_cmpgt_epi32(rounded, _mm256_set1_epi32(0x7fffff));
        const __m256i sign = _mm256_andnot_si256(_mm256_set1_epi32(0x7fffffff), u);
        store(q + i, {_mm256_and_si256(_mm256_or_si256(rounded, sign), normal)});
    }
}
// The reverse of near_parts: `width` is the number of bits of each lane part.
GZ_INLINE void store_near(const Target& target, int i, const Bytes part[3], Bytes width, Bytes exponent) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i low01 = _mm256_unpacklo_epi8(part[0].v, part[1].v), high01 = _mm256_unpackhi_epi8(part[0].v, part[1].v);
    const __m256i low2 = _mm256_unpacklo_epi8(part[2].v, zero), high2 = _mm256_unpackhi_epi8(part[2].v, zero);
    __m256i v[4] = {_mm256_unpacklo_epi16(low01, low2), _mm256_unpackhi_epi16(low01, low2), _mm256_unpacklo_epi16(high01, high2),
                    _mm256_unpackhi_epi16(high01, high2)};
    const Bytes up = splat(32) - width;
    for (int k = 0; k < 4; k++) {
        const __m256i field = _mm256_sllv_epi32(v[k], quarter(up, k));  // the sign is the top bit; no bits at all become 0
        const __m256i mantissa = _mm256_srli_epi32(_mm256_add_epi32(field, field), 9);
        const __m256i sign = _mm256_and_si256(field, _mm256_set1_epi32(int(0x80000000u)));
        v[k] = _mm256_or_si256(_mm256_or_si256(mantissa, sign), _mm256_slli_epi32(quarter(exponent, k), 23));
    }
    store_floats(target, i, _mm256_permute2x128_si256(v[0], v[1], 0x20));
    store_floats(target, i + 8, _mm256_permute2x128_si256(v[2], v[3], 0x20));
    store_floats(target, i + 16, _mm256_permute2x128_si256(v[0], v[1], 0x31));
    store_floats(target, i + 24, _mm256_permute2x128_si256(v[2], v[3], 0x31));
}
// The floors of 32 values before the shift, clamped to -128 to 127. The constants fit 14 bits.
GZ_INLINE Bytes floors_by_rule(const float* theta, const float* second, int c0, int c1, int c2) {
    auto exponents = [](const float* from, __m256i words[2]) {
        const uint8_t* p = reinterpret_cast<const uint8_t*>(from);
        __m256i e[4];
        for (int k = 0; k < 4; k++)
            e[k] = _mm256_and_si256(_mm256_srli_epi32(load_quarters(p + 16 * k, p + 64 + 16 * k), 23), _mm256_set1_epi32(255));
        words[0] = _mm256_packus_epi32(e[0], e[1]);
        words[1] = _mm256_packus_epi32(e[2], e[3]);
    };
    __m256i e[2], v[2];
    exponents(theta, e);
    if (second) exponents(second, v);
    for (int h = 0; h < 2; h++) {
        __m256i f = _mm256_add_epi16(e[h], _mm256_set1_epi16(short(c0)));
        if (second) {
            const __m256i least = _mm256_max_epi16(_mm256_add_epi16(v[h], _mm256_set1_epi16(short(c1))), _mm256_set1_epi16(short(c2)));
            f = _mm256_add_epi16(f, _mm256_srai_epi16(least, 1));
        }
        e[h] = _mm256_blendv_epi8(f, _mm256_set1_epi16(kExact), _mm256_cmpeq_epi16(e[h], _mm256_setzero_si256()));
    }
    return {_mm256_packs_epi16(e[0], e[1])};
}
GZ_INLINE Bytes add_signed(Bytes a, Bytes b) { return {_mm256_adds_epi8(a.v, b.v)}; }
GZ_INLINE Bytes smaller_signed(Bytes a, Bytes b) { return {_mm256_min_epi8(a.v, b.v)}; }

}  // namespace avx2
}  // namespace
}  // namespace gz
#endif
