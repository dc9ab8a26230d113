// The codec noise for AVX2. Lanes are coded by the plain loops.
#include <immintrin.h>

#include "noise.h"

namespace gz {
namespace noise {
namespace {
namespace avx2 {

#include "noise_plain.h"
#include "noise_x86.h"

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store256(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline __m256 load_floats(const uint8_t* x, int i) { return _mm256_loadu_ps(reinterpret_cast<const float*>(x) + i); }

inline __m256 times_power(__m256 x, const int8_t* shape, int sign) {  // x 2^(sign * shape), where that is a normal number
    const __m256i d = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(shape)));
    const __m256i bits = _mm256_castps_si256(x), more = _mm256_slli_epi32(d, 23);
    return _mm256_castsi256_ps(sign < 0 ? _mm256_sub_epi32(bits, more) : _mm256_add_epi32(bits, more));
}

// 8 values in units of 2^-24 of an integer, as in noise_avx512.cpp.
inline __m256i fixed8(__m256 x, __m256 scale) {
    const __m256 t = _mm256_mul_ps(x, scale);
    return _mm256_castps_si256(
        _mm256_blendv_ps(_mm256_castsi256_ps(_mm256_cvttps_epi32(t)), _mm256_castsi256_ps(_mm256_cvtps_epi32(t)), t));
}

inline __m256i draw8(__m256i h, __m256i add) {
    h = _mm256_mullo_epi32(_mm256_xor_si256(h, _mm256_srli_epi32(h, 15)), _mm256_set1_epi32(int(kMixAgain)));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_xor_si256(h, _mm256_srli_epi32(h, 16)), add), 8);
}

template <bool kShaped>
void round_by(const uint8_t* x, int n, const Rounding& how, int at, Work& work) {
    const __m256 scale = _mm256_set1_ps(how.scale * 0x1p24f);
    const __m256i add = _mm256_set1_epi32(int(how.add)), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int i = 0; i < n;) {
        const uint32_t first = how.first + uint32_t(i), left = 0x10000 - (first & 0xffff);
        const int end = int(left < uint32_t(n - i) ? i + int(left) : n), whole = i + (end - i) / 32 * 32;
        const uint32_t folded = how.key ^ (first ^ how.key) >> 16;
        __m256i within[4];
        for (int j = 0; j < 4; j++) {
            const __m256i number = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(8 * j));
            within[j] = _mm256_mullo_epi32(_mm256_xor_si256(number, _mm256_set1_epi32(int(folded & 31))), _mm256_set1_epi32(int(kMix)));
        }
        for (; i < whole; i += 32) {
            if (i % 64 == 0) work.ahead.fetch();
            const __m256i group = _mm256_set1_epi32(int((((how.first + uint32_t(i)) ^ folded) & ~31u) * kMix));
            __m256i q[4];
            for (int j = 0; j < 4; j++) {
                const __m256 by = kShaped ? times_power(scale, how.shape + i + 8 * j, -1) : scale;
                const __m256i fixed = fixed8(load_floats(x, i + 8 * j), by);
                q[j] = _mm256_srai_epi32(_mm256_add_epi32(fixed, draw8(_mm256_add_epi32(group, within[j]), add)), 24);
            }
            const __m256i bytes = _mm256_permutevar8x32_epi32(
                _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])), order);
            store256(work.q + at + i, bytes);
            const __m256i shifted = _mm256_add_epi8(bytes, _mm256_set1_epi8(kNarrowMost));
            const __m256i fits = _mm256_cmpeq_epi8(_mm256_min_epu8(shifted, _mm256_set1_epi8(char(2 * kNarrowMost))), shifted);
            if (__builtin_expect(_mm256_movemask_epi8(fits) != -1, 0)) round_plain(x, i, i + 32, how, at, work);
        }
        if (i < end) round_plain(x, i, end, how, at, work);
        i = end;
    }
}

uint64_t scan(const int8_t* q, int rows, uint64_t* nonzero) {
    __m256i total = _mm256_setzero_si256();
    uint64_t mask = 0;
    for (int r = 0; r < rows; r++) {
        __m256i any = _mm256_setzero_si256();
        for (int j = 0; j < 4; j++) {
            const __m256i v = load256(q + r * kRow + 32 * j);
            any = _mm256_or_si256(any, v);
            total = _mm256_add_epi64(total, _mm256_sad_epu8(_mm256_abs_epi8(v), _mm256_setzero_si256()));
        }
        mask |= uint64_t(!_mm256_testz_si256(any, any)) << r;
    }
    *nonzero = mask;
    uint64_t part[4];
    store256(part, total);
    return part[0] + part[1] + part[2] + part[3];
}

template <int kLow>
int pack_by(const int8_t* q, int rows, int reach, uint8_t* pairs, uint8_t* planes, uint8_t* escapes) {
    const __m256i add = _mm256_set1_epi8(char((1 << kLow >> 1) + (reach << kLow)));
    const __m256i most = _mm256_set1_epi8(char(((2 * reach + 1) << kLow) - 1));
    const __m256i weights = _mm256_set1_epi16(0x1001);  // first digit + 16 * second
    uint8_t* list = escapes;
    for (int g = 0; g < 2 * rows; g++) {
        __m256i words[2];
        uint64_t mask = 0;
        for (int j = 0; j < 2; j++) {
            const __m256i in = load256(q + 64 * g + 32 * j), v = _mm256_add_epi8(in, add);
            const __m256i inside = _mm256_cmpeq_epi8(_mm256_min_epu8(v, most), v);
            __m256i digit = kLow ? _mm256_and_si256(_mm256_srli_epi16(v, kLow), _mm256_set1_epi8(char(255 >> kLow))) : v;
            digit = _mm256_blendv_epi8(_mm256_set1_epi8(kEscape), digit, inside);
            words[j] = _mm256_maddubs_epi16(digit, weights);
            mask |= uint64_t(~uint32_t(_mm256_movemask_epi8(inside))) << (32 * j);
            // A giant has low bits of 0, and kGiant + add has not: kGiant is a multiple of 8, so mask it by itself.
            const __m256i lows = kLow ? _mm256_andnot_si256(_mm256_cmpeq_epi8(in, _mm256_set1_epi8(char(kGiant))), v) : v;
            for (int b = 0; b < kLow; b++)
                store32(planes + (g / 2 * kLow + b) * 16 + g % 2 * 8 + 4 * j,
                        uint32_t(_mm256_movemask_epi8(_mm256_slli_epi16(lows, 7 - b))));
        }
        store256(pairs + 32 * g, _mm256_permute4x64_epi64(_mm256_packus_epi16(words[0], words[1]), 0xd8));
        list = put_escapes(q + 64 * g, mask, kLow, list);
    }
    return int(list - escapes);
}

template <int kLow>
int unpack_by(const uint16_t* entries, int rows, int reach, const uint8_t* planes, int8_t* q, uint64_t* escaped) {
    const __m256i less = _mm256_set1_epi8(char((1 << kLow >> 1) + (reach << kLow)));
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i single = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
    int escapes = 0;
    for (int g = 0; g < 2 * rows; g++) {
        uint64_t mask = 0;
        for (int j = 0; j < 2; j++) {
            const __m256i pair = _mm256_srli_epi16(load256(entries + 32 * g + 16 * j), 8);
            const __m256i digit = _mm256_and_si256(_mm256_or_si256(pair, _mm256_slli_epi16(pair, 4)), _mm256_set1_epi8(15));
            mask |= uint64_t(uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(digit, _mm256_set1_epi8(kEscape))))) << (32 * j);
            __m256i v = _mm256_slli_epi16(digit, kLow);
            for (int b = 0; b < kLow; b++) {
                const __m256i bits = _mm256_set1_epi32(int(load32(planes + (g / 2 * kLow + b) * 16 + g % 2 * 8 + 4 * j)));
                const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(bits, spread), single), single);
                v = _mm256_or_si256(v, _mm256_and_si256(set, _mm256_set1_epi8(char(1 << b))));
            }
            store256(q + 64 * g + 32 * j, _mm256_sub_epi8(v, less));
        }
        escaped[g] = mask;
        escapes += __builtin_popcountll(mask);
    }
    return escapes;
}

// Decoded values, a register at a time.
template <bool kShaped, Delivery kTo, bool kSquares>
struct Delivering {
    const __m256 scale, divisor;
    const int8_t* const shape;
    float* const out;
    const bool stream;
    Squares* const squares;
    __m256 sum[4];
    explicit Delivering(const Target& t)
        : scale(_mm256_set1_ps(t.level * t.factor)), divisor(_mm256_set1_ps(t.divisor)), shape(t.shape), out(reinterpret_cast<float*>(t.out)),
          stream(t.stream && kTo != kAdd && reinterpret_cast<uintptr_t>(t.out) % 32 == 0), squares(t.squares) {
        if (kSquares)
            for (int j = 0; j < 4; j++) sum[j] = _mm256_load_ps(squares->lane + 8 * j);
    }
    void end() {
        if (kSquares)
            for (int j = 0; j < 4; j++) _mm256_store_ps(squares->lane + 8 * j, sum[j]);
    }

    template <int kCount>
    inline void some(const int8_t* q, int at) {
        if (kShaped && at % 64 == 0) __builtin_prefetch(shape + at + kAhead, 0, 2);
#pragma GCC unroll 8
        for (int i = 0; i < kCount; i += 8) {
            const __m256 integer = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q + i))));
            __m256 v = _mm256_mul_ps(integer, kShaped ? times_power(scale, shape + at + i, 1) : scale);
            if (kSquares) {
                const __m256 u = kShaped ? _mm256_mul_ps(integer, times_power(_mm256_set1_ps(1), shape + at + i, 1)) : integer;
                sum[i / 8 % 4] = _mm256_fmadd_ps(u, u, sum[i / 8 % 4]);
            }
            if (kTo == kAdd) v = _mm256_add_ps(_mm256_loadu_ps(out + at + i), v);
            if (kTo == kDivide) v = _mm256_div_ps(v, divisor);
            if (stream) _mm256_stream_ps(out + at + i, v);
            else _mm256_storeu_ps(out + at + i, v);
        }
    }
};

#include "noise_vectors.h"

}  // namespace avx2
}  // namespace

const Kernels* avx2_kernels() {
    static const Kernels kernels{"avx2", avx2::squares, avx2::weights, avx2::largest_plain, avx2::shape_plain, avx2::round, avx2::scan, avx2::pack, avx2::encode_lanes_plain,
                                 avx2::decode_lanes, avx2::unpack, avx2::deliver, avx2::accumulate_plain};
    return &kernels;
}

}  // namespace noise
}  // namespace gz
