// The block coder for AVX-512 with VBMI2 (Ice Lake, Zen 4 and later).
#include "lanes_avx512.h"

namespace gz {
namespace {
namespace avx512 {

// `to` may be `from` or lie before it: a store never reaches beyond what has been read.
inline void compress_bytes(const uint8_t* from, const uint8_t* exponent, int n, uint8_t* to) {
    int i = 0;
    for (; i + 64 <= n; i += 64) {
        __m512i e = _mm512_loadu_si512(exponent + i);
        __mmask64 keep = _mm512_test_epi8_mask(e, e);
        _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(keep, _mm512_loadu_si512(from + i)));
        to += __builtin_popcountll(keep);
    }
    if (i == n) return;
    __mmask64 here = (__mmask64(1) << (n - i)) - 1;
    __m512i e = _mm512_loadu_si512(exponent + i);
    __mmask64 keep = _mm512_test_epi8_mask(e, e) & here;
    _mm512_mask_storeu_epi8(to, here, _mm512_maskz_compress_epi8(keep, _mm512_maskz_loadu_epi8(here, from + i)));
}

inline void expand_bytes(const uint8_t* from, int count, const uint8_t* exponent, int n, uint8_t* to) {
    const uint8_t* end = from + count;
    for (int i = 0; i < n; i += 64) {
        __m512i e = _mm512_loadu_si512(exponent + i);
        __mmask64 keep = _mm512_test_epi8_mask(e, e);
        if (n - i < 64) keep &= (__mmask64(1) << (n - i)) - 1;
        int used = __builtin_popcountll(keep);
        int64_t left = end - from;
        __mmask64 readable = left >= 64 ? ~__mmask64(0) : left > 0 ? (__mmask64(1) << left) - 1 : 0;
        _mm512_storeu_si512(to + i, _mm512_maskz_expand_epi8(keep, _mm512_maskz_loadu_epi8(readable, from)));
        from += used;
    }
}

// Large outputs bypass the cache: they will not be read soon, and a plain store would first read what it overwrites.
inline void copy_out(void* out, const void* values, size_t bytes, bool stream) {
    uint8_t* to = static_cast<uint8_t*>(out);
    const uint8_t* from = static_cast<const uint8_t*>(values);
    if (!stream || (reinterpret_cast<uintptr_t>(to) & 63)) {
        std::memcpy(to, from, bytes);
        return;
    }
    size_t i = 0;
    for (; i + 64 <= bytes; i += 64)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
    std::memcpy(to + i, from + i, bytes - i);
}

// Blocks of equal size in lockstep; pairs share a look-up, and two pairs hide each other's latencies.
inline int decode_dense_lanes(const LaneOutput* lanes, int count) {
    bool alike = true;
    for (int i = 1; i < count; i++) alike &= lanes[i].n == lanes[0].n;
    if (alike && count == 4) return decode_lanes<4>(lanes);
    for (int i = 0; i < count;) {
        bool pair = alike && i + 2 <= count;
        if (int error = pair ? decode_lanes<2>(lanes + i) : decode_lanes<1>(lanes + i)) return error;
        i += pair ? 2 : 1;
    }
    return 0;
}

// Positions of the non-zero exponents; writes up to 32 places ahead.
inline int find_nonzero(const uint8_t* exponent, int n, uint16_t* position) {
    const __m512i first = _mm512_cvtepu8_epi16(_mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                                                22, 23, 24, 25, 26, 27, 28, 29, 30, 31));
    int found = 0;
    for (int i = 0; i < n; i += 32) {
        __m256i e = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(exponent + i));
        __mmask32 nonzero = _mm256_test_epi8_mask(e, e) & lanes_here(n, i / kLanes);
        __m512i index = _mm512_add_epi16(first, _mm512_set1_epi16(short(i)));
        _mm512_storeu_si512(position + found, _mm512_maskz_compress_epi16(nonzero, index));
        found += __builtin_popcount(nonzero);
    }
    return found;
}

#include "values.h"
#include "values_avx512.h"
#include "sparse.h"
#include "near_avx512.h"
#include "sample.h"
#include "block.h"
#include "near_decode_avx512.h"

}  // namespace avx512
}  // namespace

const Kernels* avx512_kernels() {
    static const Kernels kernels{"avx512", avx512::encode_block, avx512::decode_group, avx512::sample_block,
                                 avx512::fast_floors, avx512::round_block, avx512::lost_of_block, avx512::divide};
    return &kernels;
}

}  // namespace gz
