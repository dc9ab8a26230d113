// The encoding half of lanes.h with AVX2: 32 states are two vectors of 16-bit words. A left shift by a count per lane
// is a multiplication by 2^count, whose high half tells whether the lane is full; pext gathers the refill bytes.
#ifndef GRADZIP_LANES_AVX2_H
#define GRADZIP_LANES_AVX2_H

#include <immintrin.h>

#include "lanes.h"

namespace gz {
namespace {
namespace avx2 {

struct States {
    __m256i x[2];  // lanes 0-15 and 16-31
};

// Low bytes of 32 words, in lane order.
inline __m256i narrow(__m256i a, __m256i b) {
    const __m256i low = _mm256_set1_epi16(255);
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low)), 0xd8);
}

// 2^count for words that hold 0 to 8.
inline __m256i power(__m256i count) {
    const __m256i low = _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0));
    // An index byte with its top bit set looks up 0.
    __m256i low_byte = _mm256_shuffle_epi8(low, _mm256_or_si256(count, _mm256_set1_epi16(short(0x8000))));
    __m256i high_byte = _mm256_shuffle_epi8(high, _mm256_or_si256(_mm256_slli_epi16(count, 8), _mm256_set1_epi16(0x80)));
    return _mm256_or_si256(low_byte, high_byte);
}

// Writes up to 8 bytes beyond the refill stream.
inline void push(States& s, const __m256i bits[2], const __m256i count[2], uint8_t*& out) {
    __m256i empty[2], before[2] = {s.x[0], s.x[1]};
    for (int h = 0; h < 2; h++) {
        __m256i factor = power(count[h]);
        empty[h] = _mm256_cmpeq_epi16(_mm256_mulhi_epu16(s.x[h], factor), _mm256_setzero_si256());
        s.x[h] = _mm256_blendv_epi8(_mm256_srli_epi16(s.x[h], 8), s.x[h], empty[h]);
        s.x[h] = _mm256_or_si256(_mm256_mullo_epi16(s.x[h], factor), bits[h]);
    }
    alignas(32) uint64_t bytes[4], full[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), narrow(before[0], before[1]));
    __m256i keep = _mm256_permute4x64_epi64(_mm256_packs_epi16(empty[0], empty[1]), 0xd8);
    _mm256_store_si256(reinterpret_cast<__m256i*>(full), _mm256_xor_si256(keep, _mm256_set1_epi8(-1)));
    for (int i = 0; i < 4; i++) {
        uint64_t gathered = _pext_u64(bytes[i], full[i]);
        std::memcpy(out, &gathered, 8);
        out += __builtin_popcountll(full[i]) >> 3;
    }
}

inline void widen(const uint8_t* bytes, __m256i words[2]) {
    for (int h = 0; h < 2; h++)
        words[h] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * h)));
}

inline LaneEnd encode_lanes(const LaneInput& in, uint8_t* states, uint8_t* out) {
    States s{{_mm256_set1_epi16(256), _mm256_set1_epi16(256)}};
    // All look-ups first: a vector load right behind the narrow stores that it covers would have to wait for them.
    uint16_t code_of[256];
    alignas(32) uint16_t codes[kBlock + kLanes];
    entries_by_exponent(*in.table, in.base, code_of);
    for (int i = 0; i < in.n; i++) codes[i] = code_of[in.exponent[i]];
    std::memset(codes + in.n, 0, kLanes * sizeof(uint16_t));
    bool any_escape = false;
    for (int row = (in.n - 1) / kLanes; row >= 0; row--) {
        const int start = row * kLanes, here = in.n - start < kLanes ? in.n - start : kLanes;
        const __m256i lane = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
                                              24, 25, 26, 27, 28, 29, 30, 31);
        const __m256i present = _mm256_cmpgt_epi8(_mm256_set1_epi8(char(here)), lane);
        alignas(32) uint8_t part[kLanes], count[kLanes];
        __m256i bits[2], counts[2];
        auto push_bytes = [&] {
            widen(part, bits);
            widen(count, counts);
            push(s, bits, counts, out);
        };
        for (int c = in.chunks - 1; c >= 0; c--) {
            const __m256i* row_width = reinterpret_cast<const __m256i*>(in.width + start);
            const __m256i* row_part = reinterpret_cast<const __m256i*>(in.chunk[c] + start);
            __m256i width = _mm256_and_si256(_mm256_loadu_si256(row_width), present);
            __m256i number = _mm256_min_epu8(_mm256_subs_epu8(width, _mm256_set1_epi8(char(8 * c))), _mm256_set1_epi8(8));
            if (_mm256_testz_si256(number, number)) continue;
            _mm256_store_si256(reinterpret_cast<__m256i*>(count), number);
            _mm256_store_si256(reinterpret_cast<__m256i*>(part), _mm256_and_si256(_mm256_loadu_si256(row_part), present));
            push_bytes();
        }
        if (in.level) {
            for (int j = 0; j < kLanes; j++) {
                bool nonzero = j < here && in.exponent[start + j];
                count[j] = nonzero ? 2 : 0;
                part[j] = nonzero ? in.level[start + j] : 0;
            }
            push_bytes();
        }
        if (in.single) continue;
        const __m256i* entries = reinterpret_cast<const __m256i*>(codes + start);
        __m256i seen = _mm256_or_si256(_mm256_load_si256(entries), _mm256_load_si256(entries + 1));
        if (__builtin_expect(_mm256_movemask_epi8(seen) & int(0xaaaaaaaa), 0)) {  // kEscaped is a word's top bit
            any_escape = true;
            for (int j = 0; j < kLanes; j++) {
                bool escaped = codes[start + j] & (kEscaped << 8);
                count[j] = escaped ? 8 : 0;
                part[j] = escaped ? in.exponent[start + j] : 0;
            }
            push_bytes();
        }
        for (int h = 0; h < 2; h++) {
            __m256i both = _mm256_load_si256(entries + h);
            bits[h] = _mm256_and_si256(both, _mm256_set1_epi16(255));
            counts[h] = _mm256_and_si256(_mm256_srli_epi16(both, 8), _mm256_set1_epi16(15));
        }
        push(s, bits, counts, out);
    }
    for (int h = 0; h < 2; h++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(states) + h, s.x[h]);
    return {out, any_escape};
}

}  // namespace avx2
}  // namespace
}  // namespace gz
#endif
