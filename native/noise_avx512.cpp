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

// 2^(sign * d) for shapes d = -12 to 0, by their low 4 bits.
inline __m512 powers(int sign) {
    alignas(64) float table[16] = {};
    for (int d = -12; d <= 0; d++) table[d & 15] = power_of_two(sign * d);
    return _mm512_load_ps(table);
}

// The low 4 bits of each of 16 shapes look up a number in a register.
inline __m512 look_up_shape(const int8_t* shape, __m512 table) {
    return _mm512_permutexvar_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(shape))), table);
}

// 16 values in units of 2^-24 of an integer; what is no int32 becomes -2^31, which is a giant.
inline __m512i fixed16(__m512 x, __m512 scale) {
    const __m512 t = _mm512_mul_ps(x, scale);
    return _mm512_mask_cvtps_epi32(_mm512_cvttps_epi32(t), _mm512_movepi32_mask(_mm512_castps_si512(t)), t);
}

// 16 draws of 24 bits; the first product of the mix is given.
inline __m512i draw16(__m512i h, __m512i add) {
    h = _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 15)), _mm512_set1_epi32(int(kMixAgain)));
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 16)), add), 8);
}

template <bool kShaped>
void round_by(const uint8_t* x, int n, const Rounding& how, int at, Work& work) {
    const __m512 scale = _mm512_set1_ps(how.scale * 0x1p24f), scales = _mm512_mul_ps(scale, powers(-1));
    const __m512i add = _mm512_set1_epi32(int(how.add));
    __m512i number[2], top;
    {
        alignas(64) uint8_t place[64];
        alignas(64) uint32_t count[32];
        for (int i = 0; i < 64; i++) place[i] = uint8_t(4 * i + 3);
        for (int i = 0; i < 32; i++) count[i] = uint32_t(i);
        top = _mm512_load_si512(place);
        for (int j = 0; j < 2; j++) number[j] = _mm512_load_si512(count + 16 * j);
    }
    for (int i = 0; i < n;) {
        const uint32_t first = how.first + uint32_t(i), left = 0x10000 - (first & 0xffff);
        const int end = int(left < uint32_t(n - i) ? i + int(left) : n), whole = i + (end - i) / 32 * 32;
        const uint32_t folded = how.key ^ (first ^ how.key) >> 16;
        __m512i within[2];
        for (int j = 0; j < 2; j++)
            within[j] = _mm512_mullo_epi32(_mm512_xor_si512(number[j], _mm512_set1_epi32(int(folded & 31))), _mm512_set1_epi32(int(kMix)));
        for (; i < whole; i += 32) {
            const __m512i group = _mm512_set1_epi32(int((((how.first + uint32_t(i)) ^ folded) & ~31u) * kMix));
            fetch_ahead<kShaped>(x, how.shape, i);
            __m512i q[2];
            for (int j = 0; j < 2; j++) {
                const __m512 by = kShaped ? look_up_shape(how.shape + i + 16 * j, scales) : scale;
                q[j] = _mm512_add_epi32(fixed16(load_floats(x, i + 16 * j), by), draw16(_mm512_add_epi32(group, within[j]), add));
            }
            const __m256i bytes = _mm512_castsi512_si256(_mm512_permutex2var_epi8(q[0], top, q[1]));
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
    if (!in_fixed_point(how)) round_plain(x, 0, n, how, at, work);
    else if (how.shape) round_by<true>(x, n, how, at, work);
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

    // Takes four codes of each lane, 16 bits each: length << 12 | code.
    inline void push(__m512i four) {
        const __m512i low32 = _mm512_set1_epi64(0xffffffff), one = _mm512_set1_epi16(1);
        const __m512i code = _mm512_and_si512(four, _mm512_set1_epi16(0xfff)), length = _mm512_srli_epi16(four, 12);
        // By twos: the second code is multiplied by 2 to the length of the first.
        const __m512i codes = _mm512_madd_epi16(code, _mm512_sllv_epi16(one, _mm512_slli_epi32(length, 16)));
        const __m512i lengths = _mm512_madd_epi16(length, one), first = _mm512_and_si512(lengths, low32);
        const __m512i all = _mm512_or_si512(_mm512_and_si512(codes, low32), _mm512_sllv_epi64(_mm512_srli_epi64(codes, 32), first));
        held = _mm512_or_si512(held, _mm512_sllv_epi64(all, bits));
        bits = _mm512_add_epi64(bits, _mm512_add_epi64(first, _mm512_srli_epi64(lengths, 32)));
        alignas(64) uint64_t word[8], place[8];
        _mm512_store_si512(word, held);
        _mm512_store_si512(place, to);
        for (int j = 0; j < 8; j++) store64(reinterpret_cast<uint8_t*>(place[j]), word[j]);
        to = _mm512_add_epi64(to, _mm512_srli_epi64(bits, 3));
        held = _mm512_srlv_epi64(held, _mm512_and_si512(bits, _mm512_set1_epi64(56)));
        bits = _mm512_and_si512(bits, _mm512_set1_epi64(7));
    }
};

// A row is one register of pairs, four to a lane. Interleaving bytes leaves lanes 0, 1, 4, 5, ... to the first writers and
// lanes 2, 3, 6, 7, ... to the second.
void encode_lanes(const uint8_t* pairs, int rows, const Table& table, Work& work) {
    __m512i low[4], high[4];
    for (int j = 0; j < 4; j++) {
        low[j] = _mm512_loadu_si512(table.low + 64 * j);
        high[j] = _mm512_loadu_si512(table.high + 64 * j);
    }
    alignas(64) uint64_t start[2][8], end[2][8], bits[2][8];
    for (int lane = 0; lane < kLanes; lane++)
        start[lane / 2 % 2][lane / 4 * 2 + lane % 2] = reinterpret_cast<uint64_t>(work.lanes[lane]);
    Writers writers[2];
    for (int j = 0; j < 2; j++) writers[j] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_load_si512(start[j])};
    for (int r = 0; r < rows; r++) {
        const __m512i row = _mm512_loadu_si512(pairs + r * (kRow / 2));
        const __mmask64 upper = _mm512_movepi8_mask(row);
        const __m512i a = look_up(low, row, upper), b = look_up(high, row, upper);
        writers[0].push(_mm512_unpacklo_epi8(a, b));
        writers[1].push(_mm512_unpackhi_epi8(a, b));
    }
    for (int j = 0; j < 2; j++) {
        _mm512_store_si512(end[j], writers[j].to);
        _mm512_store_si512(bits[j], writers[j].bits);
    }
    for (int lane = 0; lane < kLanes; lane++) {
        const int j = lane / 2 % 2, k = lane / 4 * 2 + lane % 2;
        work.length[lane] = int(end[j][k] - start[j][k]) + (bits[j][k] != 0);
    }
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
    const __m512 level = _mm512_set1_ps(target.level), divisor = _mm512_set1_ps(target.divisor), power = powers(1);
    const bool stream = target.stream && kTo != kAdd && reinterpret_cast<uintptr_t>(target.out) % 64 == 0;
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 v = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i))));
        v = _mm512_mul_ps(v, level);
        if (kShaped) v = _mm512_mul_ps(v, look_up_shape(target.shape + i, power));
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
