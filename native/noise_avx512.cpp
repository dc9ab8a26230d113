// The codec noise for AVX-512 with VBMI (Ice Lake, Zen 4 and later).
#include <immintrin.h>

#include "noise.h"

namespace gz {
namespace noise {
namespace {
namespace avx512 {

#include "noise_plain.h"
#include "noise_x86.h"

inline __m512 load_floats(const uint8_t* x, int i) { return _mm512_loadu_ps(reinterpret_cast<const float*>(x) + i); }

// 2^d and 2^-d for shapes d = -12 to 0, by their low 4 bits.
alignas(64) constexpr float kPowers[16] = {0x1p0f, 0, 0, 0, 0x1p-12f, 0x1p-11f, 0x1p-10f, 0x1p-9f, 0x1p-8f, 0x1p-7f, 0x1p-6f, 0x1p-5f, 0x1p-4f, 0x1p-3f, 0x1p-2f, 0x1p-1f};
alignas(64) constexpr float kInverses[16] = {0x1p0f, 0, 0, 0, 0x1p12f, 0x1p11f, 0x1p10f, 0x1p9f, 0x1p8f, 0x1p7f, 0x1p6f, 0x1p5f, 0x1p4f, 0x1p3f, 0x1p2f, 0x1p1f};

// The low 4 bits of each of 16 shapes look up a number in a register.
inline __m512 look_up_shape(const int8_t* shape, __m512 table) {
    return _mm512_permutexvar_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(shape))), table);
}

// 16 values in units of 2^-24 of an integer; what is no int32 becomes -2^31, which is a giant.
inline __m512i fixed16(__m512 x, __m512 scale) {
    const __m512 t = _mm512_mul_ps(x, scale);
    return _mm512_mask_cvtps_epi32(_mm512_cvttps_epi32(t), _mm512_movepi32_mask(_mm512_castps_si512(t)), t);
}

alignas(64) constexpr uint32_t kNumbers[32] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
// The highest byte of each of 32 integers in two registers.
alignas(64) constexpr uint8_t kTopBytes[64] = {3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63, 67, 71, 75, 79, 83, 87, 91, 95, 99, 103, 107, 111, 115, 119, 123, 127};

// 16 draws of 24 bits; the first product of the mix is given.
inline __m512i draw16(__m512i h, __m512i add) {
    h = _mm512_mullo_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 15)), _mm512_set1_epi32(int(kMixAgain)));
    return _mm512_srli_epi32(_mm512_add_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 16)), add), 8);
}

template <bool kShaped>
void round_by(const uint8_t* x, int n, const Rounding& how, int at, Work& work) {
    const __m512 scale = _mm512_set1_ps(how.scale * 0x1p24f), scales = _mm512_mul_ps(scale, _mm512_load_ps(kInverses));
    const __m512i add = _mm512_set1_epi32(int(how.add));
    const __m512i top = _mm512_load_si512(kTopBytes);
    for (int i = 0; i < n;) {
        const uint32_t first = how.first + uint32_t(i), left = 0x10000 - (first & 0xffff);
        const int end = int(left < uint32_t(n - i) ? i + int(left) : n), whole = i + (end - i) / 32 * 32;
        const uint32_t folded = how.key ^ (first ^ how.key) >> 16;
        __m512i within[2];
        for (int j = 0; j < 2; j++)
            within[j] = _mm512_mullo_epi32(_mm512_xor_si512(_mm512_load_si512(kNumbers + 16 * j), _mm512_set1_epi32(int(folded & 31))), _mm512_set1_epi32(int(kMix)));
        // The integers of 32 values in the lower half of a register.
        auto integers = [&](int from) {
            const __m512i group = _mm512_set1_epi32(int((((how.first + uint32_t(from)) ^ folded) & ~31u) * kMix));
            __m512i q[2];
            for (int j = 0; j < 2; j++) {
                const __m512 by = kShaped ? look_up_shape(how.shape + from + 16 * j, scales) : scale;
                q[j] = _mm512_add_epi32(fixed16(load_floats(x, from + 16 * j), by), draw16(_mm512_add_epi32(group, within[j]), add));
            }
            return _mm512_permutex2var_epi8(q[0], top, q[1]);
        };
        auto are_giants = [](__m512i q) {
            return _mm512_cmpgt_epu8_mask(_mm512_add_epi8(q, _mm512_set1_epi8(kNarrowMost)), _mm512_set1_epi8(char(2 * kNarrowMost)));
        };
        for (; i + 64 <= whole; i += 64) {
            if (!(i & 64)) work.ahead.fetch();
            const __m512i q = _mm512_inserti64x4(integers(i), _mm512_castsi512_si256(integers(i + 32)), 1);
            _mm512_storeu_si512(work.q + at + i, q);
            if (__builtin_expect(are_giants(q) != 0, 0)) round_plain(x, i, i + 64, how, at, work);
        }
        if (i < whole) {
            const __m512i q = integers(i);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(work.q + at + i), _mm512_castsi512_si256(q));
            if (__builtin_expect(uint32_t(are_giants(q)) != 0, 0)) round_plain(x, i, i + 32, how, at, work);
            i += 32;
        }
        if (i < end) round_plain(x, i, end, how, at, work);
        i = end;
    }
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
int pack_by(const int8_t* q, int rows, int reach, uint8_t* pairs, uint8_t* planes, uint8_t* escapes) {
    const __m512i add = _mm512_set1_epi8(char((1 << kLow >> 1) + (reach << kLow)));
    const __m512i most = _mm512_set1_epi8(char(((2 * reach + 1) << kLow) - 1));
    const __m512i weights = _mm512_set1_epi16(0x1001);  // first digit + 16 * second
    uint8_t* list = escapes;
    for (int g = 0; g < 2 * rows; g++) {
        const __m512i in = _mm512_loadu_si512(q + 64 * g), v = _mm512_add_epi8(in, add);
        const __mmask64 out = _mm512_cmpgt_epu8_mask(v, most), giant = _mm512_cmpeq_epi8_mask(in, _mm512_set1_epi8(char(kGiant)));
        __m512i digit = kLow ? _mm512_and_si512(_mm512_srli_epi16(v, kLow), _mm512_set1_epi8(char(255 >> kLow))) : v;
        digit = _mm512_mask_mov_epi8(digit, out, _mm512_set1_epi8(kEscape));
        const __m512i words = _mm512_maddubs_epi16(digit, weights);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs + 32 * g), _mm512_cvtepi16_epi8(words));
        if (kLow) {
            const __mmask64 kept = ~giant;  // a giant has low bits of 0
            for (int b = 0; b < kLow; b++)
                store64(planes + (g / 2 * kLow + b) * 16 + g % 2 * 8,
                        _mm512_mask_test_epi8_mask(kept, v, _mm512_set1_epi8(char(1 << b))));
        }
        __m512i h = in;
        if (kLow) {
            h = _mm512_add_epi8(in, _mm512_set1_epi8(char(128 + (1 << kLow >> 1))));  // positive, for a shift of bytes
            h = _mm512_and_si512(_mm512_srli_epi16(h, kLow), _mm512_set1_epi8(char(255 >> kLow)));
            h = _mm512_mask_mov_epi8(_mm512_sub_epi8(h, _mm512_set1_epi8(char(128 >> kLow))), giant, in);
        }
        _mm512_storeu_si512(list, _mm512_maskz_compress_epi8(out, h));
        list += __builtin_popcountll(out);
    }
    return int(list - escapes);
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
        work.ahead.fetch();
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
int unpack_by(const uint16_t* entries, int rows, int reach, const uint8_t* planes, int8_t* q, uint64_t* escaped) {
    const __m512i less = _mm512_set1_epi8(char((1 << kLow >> 1) + (reach << kLow)));
    int escapes = 0;
    for (int g = 0; g < 2 * rows; g++) {
        const __m512i pair = _mm512_srli_epi16(_mm512_loadu_si512(entries + 32 * g), 8);
        const __m512i digit = _mm512_and_si512(_mm512_or_si512(pair, _mm512_slli_epi16(pair, 4)), _mm512_set1_epi8(15));
        const __mmask64 out = _mm512_cmpeq_epi8_mask(digit, _mm512_set1_epi8(kEscape));
        __m512i v = _mm512_slli_epi16(digit, kLow);
        for (int b = 0; b < kLow; b++)
            v = _mm512_mask_add_epi8(v, load64(planes + (g / 2 * kLow + b) * 16 + g % 2 * 8), v, _mm512_set1_epi8(char(1 << b)));
        _mm512_storeu_si512(q + 64 * g, _mm512_sub_epi8(v, less));
        escaped[g] = out;
        escapes += __builtin_popcountll(out);
    }
    return escapes;
}

// Decoded values, a register at a time.
template <bool kShaped, Delivery kTo, bool kSquares>
struct Delivering {
    const __m512 scale, divisor, power, scales;
    const int8_t* const shape;
    float* const out;
    const bool stream;
    Squares* const squares;
    __m512 sum[2];
    explicit Delivering(const Target& t)
        : scale(_mm512_set1_ps(t.level * t.factor)), divisor(_mm512_set1_ps(t.divisor)), power(_mm512_load_ps(kPowers)),
          scales(_mm512_mul_ps(scale, power)), shape(t.shape), out(reinterpret_cast<float*>(t.out)),
          stream(t.stream && kTo != kAdd && reinterpret_cast<uintptr_t>(t.out) % 64 == 0), squares(t.squares) {
        if (kSquares)
            for (int j = 0; j < 2; j++) sum[j] = _mm512_load_ps(squares->lane + 16 * j);
    }
    void end() {
        if (kSquares)
            for (int j = 0; j < 2; j++) _mm512_store_ps(squares->lane + 16 * j, sum[j]);
    }

    template <int kCount>
    inline void some(const int8_t* q, int at) {
        if (kShaped && at % 64 == 0) __builtin_prefetch(shape + at + kAhead, 0, 2);
#pragma GCC unroll 8
        for (int i = 0; i < kCount; i += 16) {
            const __m512 integer = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i))));
            __m512i d = _mm512_setzero_si512();
            if (kShaped) d = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(shape + at + i)));
            __m512 v = _mm512_mul_ps(integer, kShaped ? _mm512_permutexvar_ps(d, scales) : scale);
            if (kSquares) {
                const __m512 u = kShaped ? _mm512_mul_ps(integer, _mm512_permutexvar_ps(d, power)) : integer;
                sum[i / 16 % 2] = _mm512_fmadd_ps(u, u, sum[i / 16 % 2]);
            }
            if (kTo == kAdd) v = _mm512_add_ps(_mm512_loadu_ps(out + at + i), v);
            if (kTo == kDivide) v = _mm512_div_ps(v, divisor);
            if (stream) _mm512_stream_ps(out + at + i, v);
            else _mm512_storeu_ps(out + at + i, v);
        }
    }
};

#include "noise_vectors.h"

}  // namespace avx512
}  // namespace

const Kernels* avx512_kernels() {
    static const Kernels kernels{"avx512", avx512::squares, avx512::weights, avx512::largest_plain, avx512::shape_plain, avx512::round, avx512::scan, avx512::pack, avx512::encode_lanes,
                                 avx512::decode_lanes, avx512::unpack, avx512::deliver, avx512::accumulate_plain};
    return &kernels;
}

}  // namespace noise
}  // namespace gz
