// The codec noise for AVX-512 with VBMI (Ice Lake, Zen 4 and later).
#include <immintrin.h>

#include "noise.h"

namespace gz {
namespace noise {
namespace {
namespace avx512 {

#include "noise_plain.h"

inline __m512 load_floats(const uint8_t* x, int i) { return _mm512_loadu_ps(reinterpret_cast<const float*>(x) + i); }

double squares(const uint8_t* x, int n) {
    if (n % 32) return squares_plain(x, n);
    __m512d lane[4];
    for (__m512d& l : lane) l = _mm512_setzero_pd();
    for (int i = 0; i < n; i += 32)
        for (int j = 0; j < 4; j++) {
            const __m512d v = _mm512_cvtps_pd(_mm256_loadu_ps(reinterpret_cast<const float*>(x) + i + 8 * j));
            lane[j] = _mm512_fmadd_pd(v, v, lane[j]);  // a square of a float32 is exact, so that this is no other sum
        }
    const __m512d eight = _mm512_add_pd(_mm512_add_pd(lane[0], lane[2]), _mm512_add_pd(lane[1], lane[3]));
    double last[8];
    _mm512_storeu_pd(last, eight);
    for (int half = 4; half; half /= 2)
        for (int j = 0; j < half; j++) last[j] += last[j + half];
    return last[0];
}

uint64_t weights(const int8_t* shape, uint64_t n) {
    // Byte b of 4^j for j = 0 to 12, which is what a shape plus 12 looks up.
    const __m512i table[4] = {_mm512_broadcast_i32x4(_mm_setr_epi8(1, 4, 16, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
                              _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 1, 4, 16, 64, 0, 0, 0, 0, 0, 0, 0, 0)),
                              _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 4, 16, 64, 0, 0, 0, 0)),
                              _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0))};
    const __m512i zero = _mm512_setzero_si512(), deepest = _mm512_set1_epi8(-12);
    __m512i sum[4] = {zero, zero, zero, zero};
    uint64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i d = _mm512_min_epi8(_mm512_max_epi8(_mm512_loadu_si512(shape + i), deepest), zero);
        const __m512i j = _mm512_sub_epi8(d, deepest);
        for (int b = 0; b < 4; b++) sum[b] = _mm512_add_epi64(sum[b], _mm512_sad_epu8(_mm512_shuffle_epi8(table[b], j), zero));
    }
    uint64_t total = weights_plain(shape + i, n - i);
    for (int b = 0; b < 4; b++) total += uint64_t(_mm512_reduce_add_epi64(sum[b])) << (8 * b);
    return total;
}

// 2^(sign * shape) of 16 values; the low 4 bits of a shape look it up.
inline __m512 powers(const int8_t* shape, int sign) {
    const __m512 up = _mm512_setr_ps(1, 0, 0, 0, 0x1p12f, 0x1p11f, 0x1p10f, 0x1p9f, 0x1p8f, 0x1p7f, 0x1p6f, 0x1p5f, 0x1p4f, 0x1p3f, 0x1p2f, 0x1p1f);
    const __m512 down = _mm512_setr_ps(1, 0, 0, 0, 0x1p-12f, 0x1p-11f, 0x1p-10f, 0x1p-9f, 0x1p-8f, 0x1p-7f, 0x1p-6f, 0x1p-5f, 0x1p-4f, 0x1p-3f,
                                       0x1p-2f, 0x1p-1f);
    const __m512i d = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(shape)));
    return _mm512_permutexvar_ps(d, sign < 0 ? up : down);
}

// 16 integers. `folded` is the key with its upper half folded in, as the first step of the mix does it: the upper halves
// of all indices here are equal.
template <bool kShaped>
inline __m512i round16(const uint8_t* x, const int8_t* shape, int i, __m512 scale, __m512i index, __m512i folded, __m512i add) {
    __m512 t = _mm512_mul_ps(load_floats(x, i), scale);
    if (kShaped) t = _mm512_mul_ps(t, powers(shape + i, -1));
    const __m512 k = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), above = _mm512_sub_ps(t, k);
    __m512i h = _mm512_mullo_epi32(_mm512_xor_si512(index, folded), _mm512_set1_epi32(0x7feb352d));
    h = _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 15)), _mm512_set1_epi32(int(0x846ca68bu)));
    h = _mm512_add_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 16)), add);
    const __m512 least = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(h, 8)), _mm512_set1_ps(0x1p-24f), _mm512_set1_ps(1));
    const __mmask16 up = _mm512_cmp_ps_mask(above, least, _CMP_GE_OQ);
    const __m512i q = _mm512_cvttps_epi32(k);
    return _mm512_mask_sub_epi32(q, up, q, _mm512_set1_epi32(-1));
}

template <bool kShaped>
void round_by(const uint8_t* x, int n, const Rounding& how, int at, Work& work) {
    const __m512 scale = _mm512_set1_ps(how.scale);
    const __m512i add = _mm512_set1_epi32(int(how.add)), sixteen = _mm512_set1_epi32(16);
    const __m512i ascending = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int i = 0; i < n;) {
        const uint32_t first = how.first + uint32_t(i), left = 0x10000 - (first & 0xffff);
        const int end = int(left < uint32_t(n - i) ? i + int(left) : n), whole = i + (end - i) / 32 * 32;
        const uint32_t high = (first ^ how.key) >> 16;
        const __m512i folded = _mm512_set1_epi32(int(how.key ^ high));
        __m512i index = _mm512_add_epi32(_mm512_set1_epi32(int(first)), ascending);
        for (; i < whole; i += 32) {
            const __m512i a = round16<kShaped>(x, how.shape, i, scale, index, folded, add);
            index = _mm512_add_epi32(index, sixteen);
            const __m512i b = round16<kShaped>(x, how.shape, i + 16, scale, index, folded, add);
            index = _mm512_add_epi32(index, sixteen);
            const __m256i bytes = _mm256_set_m128i(_mm512_cvtsepi32_epi8(b), _mm512_cvtsepi32_epi8(a));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(work.q + at + i), bytes);
            const __mmask32 giant = _mm256_cmpgt_epu8_mask(_mm256_add_epi8(bytes, _mm256_set1_epi8(kNarrowMost)),
                                                           _mm256_set1_epi8(char(2 * kNarrowMost)));
            if (__builtin_expect(giant != 0, 0)) round_plain(x, i, i + 32, how, at, work);
        }
        if (i < end) round_plain(x, i, end, how, at, work);
        i = end;
    }
}

void round(const uint8_t* x, int n, const Rounding& how, int at, Work& work) {
    if (how.shape) round_by<true>(x, n, how, at, work);
    else round_by<false>(x, n, how, at, work);
}

uint64_t scan(const int8_t* q, int rows, uint64_t* nonzero) {
    __m512i total = _mm512_setzero_si512();
    uint64_t mask = 0;
    for (int r = 0; r < rows; r++) {
        const __m512i a = _mm512_loadu_si512(q + r * kRow), b = _mm512_loadu_si512(q + r * kRow + 64);
        const __m512i any = _mm512_or_si512(a, b);
        total = _mm512_add_epi64(total, _mm512_sad_epu8(_mm512_abs_epi8(a), _mm512_setzero_si512()));
        total = _mm512_add_epi64(total, _mm512_sad_epu8(_mm512_abs_epi8(b), _mm512_setzero_si512()));
        mask |= uint64_t(_mm512_test_epi64_mask(any, any) != 0) << r;
    }
    *nonzero = mask;
    return uint64_t(_mm512_reduce_add_epi64(total));
}

template <int kLow>
bool pack_by(const int8_t* q, int rows, int reach, uint8_t* pairs, uint8_t* planes, uint64_t* escaped) {
    const __m512i add = _mm512_set1_epi8(char((1 << kLow >> 1) + (reach << kLow)));
    const __m512i most = _mm512_set1_epi8(char(((2 * reach + 1) << kLow) - 1));
    const __m512i weights = _mm512_set1_epi16(0x1001);  // first digit + 16 * second
    uint64_t any = 0;
    for (int g = 0; g < 2 * rows; g++) {
        const __m512i in = _mm512_loadu_si512(q + 64 * g), v = _mm512_add_epi8(in, add);
        const __mmask64 out = _mm512_cmpgt_epu8_mask(v, most);
        __m512i digit = kLow ? _mm512_and_si512(_mm512_srli_epi16(v, kLow), _mm512_set1_epi8(char(255 >> kLow))) : v;
        digit = _mm512_mask_mov_epi8(digit, out, _mm512_set1_epi8(kEscape));
        const __m512i words = _mm512_maddubs_epi16(digit, weights);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs + 32 * g), _mm512_cvtepi16_epi8(words));
        if (kLow) {
            __mmask64 kept = ~__mmask64(0);  // a giant has low bits of 0
            if (out) kept = _mm512_cmpneq_epi8_mask(in, _mm512_set1_epi8(char(kGiant)));
            for (int b = 0; b < kLow; b++)
                store64(planes + (g / 2 * kLow + b) * 16 + g % 2 * 8,
                        _mm512_mask_test_epi8_mask(kept, v, _mm512_set1_epi8(char(1 << b))));
        }
        escaped[g] = out;
        any |= out;
    }
    return any != 0;
}

bool pack(const int8_t* q, int rows, int low, int reach, uint8_t* pairs, uint8_t* planes, uint64_t* escaped) {
    switch (low) {
        case 0: return pack_by<0>(q, rows, reach, pairs, planes, escaped);
        case 1: return pack_by<1>(q, rows, reach, pairs, planes, escaped);
        case 2: return pack_by<2>(q, rows, reach, pairs, planes, escaped);
        default: return pack_by<3>(q, rows, reach, pairs, planes, escaped);
    }
}

// 64 look-ups in a table of 256 bytes; `upper` says which indices are 128 and above.
inline __m512i look_up(const __m512i* table, __m512i index, __mmask64 upper) {
    const __m512i below = _mm512_permutex2var_epi8(table[0], index, table[1]);
    return _mm512_mask_mov_epi8(below, upper, _mm512_permutex2var_epi8(table[2], index, table[3]));
}

// Eight lanes that take bits in turn; a lane holds up to 7 bits between its turns.
struct Writers {
    __m512i held, bits, to;
    inline void push(__m512i code, __m512i length) {
        held = _mm512_or_si512(held, _mm512_sllv_epi64(code, bits));
        bits = _mm512_add_epi64(bits, length);
        alignas(64) uint64_t word[8], place[8];
        _mm512_store_si512(word, held);
        _mm512_store_si512(place, to);
        for (int j = 0; j < 8; j++) store64(reinterpret_cast<uint8_t*>(place[j]), word[j]);
        to = _mm512_add_epi64(to, _mm512_srli_epi64(bits, 3));
        held = _mm512_srlv_epi64(held, _mm512_and_si512(bits, _mm512_set1_epi64(56)));
        bits = _mm512_and_si512(bits, _mm512_set1_epi64(7));
    }
};

// Lane 2j is element j of the first writers, lane 2j + 1 of the second. A row is one register of pairs, four to a lane.
void encode_lanes(const uint8_t* pairs, int rows, const Table& table, const Ahead& ahead, Work& work) {
    __m512i low[4], high[4];
    for (int j = 0; j < 4; j++) {
        low[j] = _mm512_loadu_si512(table.low + 64 * j);
        high[j] = _mm512_loadu_si512(table.high + 64 * j);
    }
    alignas(64) uint64_t start[2][8];
    for (int lane = 0; lane < kLanes; lane++) start[lane % 2][lane / 2] = reinterpret_cast<uint64_t>(work.lanes[lane]);
    Writers even{_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_load_si512(start[0])};
    Writers odd{_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_load_si512(start[1])};
    const __m512i low16 = _mm512_set1_epi32(0xffff), low32 = _mm512_set1_epi64(0xffffffff);
    for (int r = 0; r < rows; r++) {
        ahead.fetch(r);
        const __m512i four = _mm512_loadu_si512(pairs + r * (kRow / 2));
        const __mmask64 upper = _mm512_movepi8_mask(four);
        const __m512i a = look_up(low, four, upper), b = look_up(high, four, upper);
        // Of pairs 0 and 2 of each lane, and of pairs 1 and 3: codes and lengths in 16 bits
        const __m512i code02 = _mm512_or_si512(_mm512_and_si512(a, _mm512_set1_epi16(0xff)),
                                               _mm512_slli_epi16(_mm512_and_si512(b, _mm512_set1_epi16(0xf0)), 4));
        const __m512i code13 = _mm512_or_si512(_mm512_srli_epi16(a, 8),
                                               _mm512_srli_epi16(_mm512_and_si512(b, _mm512_set1_epi16(short(0xf000))), 4));
        const __m512i length02 = _mm512_and_si512(b, _mm512_set1_epi16(15));
        const __m512i length13 = _mm512_and_si512(_mm512_srli_epi16(b, 8), _mm512_set1_epi16(15));
        const __m512i length = _mm512_add_epi16(length02, length13);
        // Pairs 0 and 1 of each lane, and pairs 2 and 3: in 32 bits
        const __m512i code01 = _mm512_or_si512(
            _mm512_and_si512(code02, low16), _mm512_sllv_epi32(_mm512_and_si512(code13, low16), _mm512_and_si512(length02, low16)));
        const __m512i code23 = _mm512_or_si512(
            _mm512_srli_epi32(code02, 16), _mm512_sllv_epi32(_mm512_srli_epi32(code13, 16), _mm512_srli_epi32(length02, 16)));
        const __m512i length01 = _mm512_and_si512(length, low16);
        const __m512i total = _mm512_add_epi32(length01, _mm512_srli_epi32(length, 16));
        // All four: in 64 bits
        even.push(_mm512_or_si512(_mm512_and_si512(code01, low32),
                                  _mm512_sllv_epi64(_mm512_and_si512(code23, low32), _mm512_and_si512(length01, low32))),
                  _mm512_and_si512(total, low32));
        odd.push(_mm512_or_si512(_mm512_srli_epi64(code01, 32),
                                 _mm512_sllv_epi64(_mm512_srli_epi64(code23, 32), _mm512_srli_epi64(length01, 32))),
                 _mm512_srli_epi64(total, 32));
    }
    alignas(64) uint64_t end[2][8], bits[2][8];
    _mm512_store_si512(end[0], even.to);
    _mm512_store_si512(end[1], odd.to);
    _mm512_store_si512(bits[0], even.bits);
    _mm512_store_si512(bits[1], odd.bits);
    for (int lane = 0; lane < kLanes; lane++)
        work.length[lane] = int(end[lane % 2][lane / 2] - start[lane % 2][lane / 2]) + (bits[lane % 2][lane / 2] != 0);
}

template <int kLow>
bool unpack_by(const uint16_t* entries, int rows, int reach, const uint8_t* planes, int8_t* q, uint64_t* escaped) {
    const __m512i less = _mm512_set1_epi8(char((1 << kLow >> 1) + (reach << kLow)));
    uint64_t any = 0;
    for (int g = 0; g < 2 * rows; g++) {
        const __m512i pair = _mm512_srli_epi16(_mm512_loadu_si512(entries + 32 * g), 8);
        const __m512i digit = _mm512_and_si512(_mm512_or_si512(pair, _mm512_slli_epi16(pair, 4)), _mm512_set1_epi8(15));
        const __mmask64 out = _mm512_cmpeq_epi8_mask(digit, _mm512_set1_epi8(kEscape));
        __m512i v = _mm512_slli_epi16(digit, kLow);
        for (int b = 0; b < kLow; b++)
            v = _mm512_mask_add_epi8(v, load64(planes + (g / 2 * kLow + b) * 16 + g % 2 * 8), v, _mm512_set1_epi8(char(1 << b)));
        _mm512_storeu_si512(q + 64 * g, _mm512_sub_epi8(v, less));
        escaped[g] = out;
        any |= out;
    }
    return any != 0;
}

bool unpack(const uint16_t* entries, int rows, int low, int reach, const uint8_t* planes, int8_t* q, uint64_t* escaped) {
    switch (low) {
        case 0: return unpack_by<0>(entries, rows, reach, planes, q, escaped);
        case 1: return unpack_by<1>(entries, rows, reach, planes, q, escaped);
        case 2: return unpack_by<2>(entries, rows, reach, planes, q, escaped);
        default: return unpack_by<3>(entries, rows, reach, planes, q, escaped);
    }
}

template <bool kShaped, Delivery kTo>
void deliver_by(const int8_t* q, int n, const Target& target) {
    const __m512 level = _mm512_set1_ps(target.level), divisor = _mm512_set1_ps(target.divisor);
    const bool stream = target.stream && kTo != kAdd && reinterpret_cast<uintptr_t>(target.out) % 64 == 0;
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 v = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i))));
        v = _mm512_mul_ps(v, level);
        if (kShaped) v = _mm512_mul_ps(v, powers(target.shape + i, 1));
        if (kTo == kAdd) v = _mm512_add_ps(load_floats(target.out, i), v);
        if (kTo == kDivide) v = _mm512_div_ps(v, divisor);
        float* to = reinterpret_cast<float*>(target.out) + i;
        if (stream) _mm512_stream_ps(to, v);
        else _mm512_storeu_ps(to, v);
    }
    deliver_plain(q, i, n, target);
}

template <bool kShaped>
void deliver_shaped(const int8_t* q, int n, const Target& target) {
    if (target.delivery == kPut) deliver_by<kShaped, kPut>(q, n, target);
    else if (target.delivery == kAdd) deliver_by<kShaped, kAdd>(q, n, target);
    else deliver_by<kShaped, kDivide>(q, n, target);
}

void deliver(const int8_t* q, int n, const Target& target) {
    if (target.shape) deliver_shaped<true>(q, n, target);
    else deliver_shaped<false>(q, n, target);
}

}  // namespace avx512
}  // namespace

const Kernels* avx512_kernels() {
    static const Kernels kernels{"avx512", avx512::squares, avx512::weights, avx512::round, avx512::scan, avx512::pack, avx512::encode_lanes,
                                 avx512::decode_lanes_by<8>, avx512::unpack, avx512::deliver};
    return &kernels;
}

}  // namespace noise
}  // namespace gz
