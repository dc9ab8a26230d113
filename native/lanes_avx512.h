// The lanes of lanes.h with AVX-512 (VBMI2): a block's 32 states are one vector of 16-bit words, a look-up in a
// 256-entry table is two byte permutations, and the refill bytes of a row are one compress or expand.
#ifndef GRADZIP_LANES_AVX512_H
#define GRADZIP_LANES_AVX512_H

#include <immintrin.h>

#include "lanes.h"

namespace gz {
namespace {
namespace avx512 {

// 256 bytes in four registers.
struct ByteTable {
    __m512i part[4];
    explicit ByteTable(const uint8_t* bytes) {
        for (int i = 0; i < 4; i++) part[i] = _mm512_load_si512(bytes + 64 * i);
    }
    __m512i operator[](__m512i index) const {
        __m512i low = _mm512_permutex2var_epi8(part[0], index, part[1]);
        __m512i high = _mm512_permutex2var_epi8(part[2], index, part[3]);
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
    }
};

inline __m512i widen(__m256i bytes) { return _mm512_cvtepu8_epi16(bytes); }
inline __m256i load_row(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store_row(uint8_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
inline __m256i low_half(__m512i v) { return _mm512_castsi512_si256(v); }
inline __m256i high_half(__m512i v) { return _mm512_extracti64x4_epi64(v, 1); }

// Writes up to 32 bytes at out.
inline void push(__m512i& x, __m512i bits, __m512i count, uint8_t*& out) {
    __mmask32 full = _mm512_cmpgt_epu16_mask(x, _mm512_srlv_epi16(_mm512_set1_epi16(-1), count));
    store_row(out, _mm256_maskz_compress_epi8(full, _mm512_cvtepi16_epi8(x)));
    out += __builtin_popcount(full);
    x = _mm512_mask_srli_epi16(x, full, x, 8);
    x = _mm512_or_si512(_mm512_sllv_epi16(x, count), bits);
}

// The same for 8 bits in every lane: all are full then, and a byte of each moves out as one of `bits` moves in.
inline void push_bytes(__m512i& x, __m256i bits, uint8_t*& out) {
    store_row(out, _mm512_cvtepi16_epi8(x));
    out += kLanes;
    x = _mm512_ternarylogic_epi32(x, _mm512_set1_epi16(short(0xff00)), widen(bits), 0xea);  // (x & mask) | bits
}

inline bool all_eight(__m256i count) { return _mm256_cmpeq_epi8_mask(count, _mm256_set1_epi8(8)) == ~__mmask32(0); }

inline __mmask32 lanes_here(int n, int row) {
    int here = n - row * kLanes;
    return here >= kLanes ? ~__mmask32(0) : (__mmask32(1) << here) - 1;
}

// One block's lanes while encoding; `out` needs 32 bytes of slack, and the input arrays are readable up to a
// multiple of 64 values.
struct Writer {
    const LaneInput* in;
    __m512i x, base;
    uint8_t* out;
    uint32_t escapes;

    void start(const LaneInput& input, uint8_t* refill) {
        in = &input;
        x = _mm512_set1_epi16(256);
        base = _mm512_set1_epi8(char(input.base));
        out = refill;
        escapes = 0;
    }
    // Phases 4 and 3: chunks and level.
    void push_lane_part(int row, __m256i e, __mmask32 here) {
        int start = row * kLanes;
        if (in->chunks) {
            const bool whole = here == ~__mmask32(0);
            auto row_of = [&](const uint8_t* bytes) {
                __m256i row_bytes = load_row(bytes + start);
                return __builtin_expect(whole, 1) ? row_bytes : _mm256_maskz_mov_epi8(here, row_bytes);
            };
            const __m256i width = row_of(in->width), eight = _mm256_set1_epi8(8);
            if (in->chunks > 2) {
                __m256i count = _mm256_subs_epu8(width, _mm256_set1_epi8(16));
                if (!_mm256_testz_si256(count, count)) push(x, widen(row_of(in->chunk[2])), widen(count), out);
            }
            if (in->chunks > 1) {
                __m256i count = _mm256_min_epu8(eight, _mm256_subs_epu8(width, eight));
                if (!_mm256_testz_si256(count, count)) push(x, widen(row_of(in->chunk[1])), widen(count), out);
            }
            const __m256i count = _mm256_min_epu8(eight, width);
            if (all_eight(count))
                push_bytes(x, load_row(in->chunk[0] + start), out);
            else
                push(x, widen(row_of(in->chunk[0])), widen(count), out);
        }
        if (in->level) {
            __mmask32 nonzero = _mm256_test_epi8_mask(e, e) & here;
            push(x, _mm512_maskz_mov_epi16(nonzero, widen(load_row(in->level + start))), _mm512_maskz_set1_epi16(nonzero, 2), out);
        }
    }
    // Phases 2 and 1: escaped exponents and codes.
    void push_symbols(__m256i e, __m256i code, __m256i length, __mmask32 escaped, __mmask32 here) {
        escaped &= here;
        if (__builtin_expect(escaped != 0, 0)) {
            escapes |= escaped;
            push(x, _mm512_maskz_mov_epi16(escaped, widen(e)), _mm512_maskz_set1_epi16(escaped, 8), out);
        }
        if (__builtin_expect(here != ~__mmask32(0), 0)) {
            code = _mm256_maskz_mov_epi8(here, code);
            length = _mm256_maskz_mov_epi8(here, length);
        }
        push(x, widen(code), widen(length), out);
    }
};

inline LaneEnd encode_lanes(const LaneInput& in, uint8_t* states, uint8_t* refill) {
    Writer writer;
    writer.start(in, refill);
    const ByteTable codes(in.table->code), lengths(in.table->length);
    const int rows = (in.n + kLanes - 1) / kLanes;
    for (int pair = (rows - 1) / 2; pair >= 0; pair--) {
        in.prefetch.lines(pair);
        // Two rows share the look-ups.
        __m512i e = _mm512_loadu_si512(in.exponent + 64 * pair);
        __m512i symbol = _mm512_sub_epi8(e, writer.base);
        symbol = _mm512_mask_sub_epi8(symbol, _mm512_cmple_epu8_mask(e, writer.base), symbol, _mm512_set1_epi8(1));
        symbol = _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(e, e), symbol);
        __m512i code = codes[symbol], length = lengths[symbol];
        __mmask64 escaped = _mm512_movepi8_mask(length);
        length = _mm512_and_si512(length, _mm512_set1_epi8(15));
        const int row = 2 * pair;
        if (row + 1 < rows) {
            __mmask32 here = lanes_here(in.n, row + 1);
            writer.push_lane_part(row + 1, high_half(e), here);
            if (!in.single) writer.push_symbols(high_half(e), high_half(code), high_half(length), __mmask32(escaped >> 32), here);
        }
        __mmask32 here = lanes_here(in.n, row);
        writer.push_lane_part(row, low_half(e), here);
        if (!in.single) writer.push_symbols(low_half(e), low_half(code), low_half(length), __mmask32(escaped), here);
    }
    _mm512_storeu_si512(states, writer.x);
    return {writer.out, writer.escapes != 0};
}

// One block's lanes while decoding. Reads may run 32 bytes over the end of the refill stream.
struct Reader {
    __m512i x;
    const uint8_t *begin, *at;

    int start(const LaneOutput& o) {
        x = _mm512_loadu_si512(o.states);
        begin = o.refill;
        at = o.end;
        return _mm512_cmplt_epu16_mask(x, _mm512_set1_epi16(256)) ? GZ_BAD_DENSE : 0;
    }
    // Drops count bits; false if the stream runs dry.
    __attribute__((always_inline)) bool drop(__m512i count) {
        x = _mm512_srlv_epi16(x, count);
        __mmask32 low = _mm512_cmplt_epu16_mask(x, _mm512_set1_epi16(256));
        int need = __builtin_popcount(low);
        if (__builtin_expect(at - begin < need, 0)) return false;
        at -= need;
        __m512i bytes = widen(_mm256_maskz_expand_epi8(low, load_row(at)));
        x = _mm512_or_si512(_mm512_mask_slli_epi16(x, low, x, 8), bytes);
        return true;
    }
    bool pop(__m256i count, __m256i* bits) {
        // 2^count - 1 for counts 0 to 8, from a table of 16 bytes.
        const __m256i masks = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 3, 7, 15, 31, 63, 127, -1, -1, -1, -1, -1, -1, -1, -1));
        *bits = _mm256_and_si256(_mm512_cvtepi16_epi8(x), _mm256_shuffle_epi8(masks, count));
        return drop(widen(count));
    }
    // The same for 8 bits in every lane: all of them take a byte.
    bool pop_bytes(__m256i* bits) {
        if (__builtin_expect(at - begin < kLanes, 0)) return false;
        at -= kLanes;
        *bits = _mm512_cvtepi16_epi8(x);
        x = _mm512_ternarylogic_epi32(x, _mm512_set1_epi16(short(0xff00)), widen(load_row(at)), 0xea);
        return true;
    }
    bool done() const { return at == begin && _mm512_cmpeq_epi16_mask(x, _mm512_set1_epi16(256)) == ~__mmask32(0); }
};

// The phases of one row after its exponents are known; false if the stream runs dry.
inline bool decode_row(const LaneOutput& o, Reader& reader, int row, __m256i e, __mmask32 here) {
    int start = row * kLanes;
    __mmask32 nonzero = _mm256_test_epi8_mask(e, e) & here;
    __m256i bits;
    if (o.coding == kFixed) {
        if (!o.rest) return true;
        if (!reader.pop(_mm256_maskz_set1_epi8(o.pruned ? nonzero : here, char(o.rest)), &bits)) return false;
        store_row(o.chunk[0] + start, bits);
        return true;
    }
    __m256i width;
    if (o.coding == kNear) {
        // kept = e - (f + 127), where f + 127 as an unsigned byte is f + 128 - 1: it saturates at 0 by itself.
        __m256i floor = load_row(reinterpret_cast<const uint8_t*>(o.floor) + start);
        __mmask32 exact = _mm256_cmpeq_epi8_mask(floor, _mm256_set1_epi8(char(kExact))) |
                          _mm256_cmpeq_epi8_mask(e, _mm256_set1_epi8(-1));
        __m256i grid = _mm256_add_epi8(floor, _mm256_set1_epi8(127));
        __m256i kept = _mm256_min_epu8(_mm256_subs_epu8(e, grid), _mm256_set1_epi8(23));
        kept = _mm256_mask_mov_epi8(kept, exact, _mm256_set1_epi8(23));
        width = _mm256_maskz_add_epi8(nonzero, kept, _mm256_set1_epi8(1));
    } else {
        if (!reader.pop(_mm256_maskz_set1_epi8(nonzero, 2), &bits)) return false;
        store_row(o.level + start, bits);
        __m256i twice = _mm256_add_epi8(bits, bits), cut = _mm256_add_epi8(_mm256_add_epi8(twice, twice), twice);
        width = _mm256_maskz_sub_epi8(nonzero, _mm256_set1_epi8(24), cut);
    }
    store_row(o.width + start, width);
    for (int c = 0; c < 3; c++) {
        __m256i count = _mm256_min_epu8(_mm256_set1_epi8(8), _mm256_subs_epu8(width, _mm256_set1_epi8(char(8 * c))));
        bits = _mm256_setzero_si256();
        if (c == 0 && all_eight(count)) {
            if (!reader.pop_bytes(&bits)) return false;
        } else if (c == 0 || !_mm256_testz_si256(count, count)) {
            if (!reader.pop(count, &bits)) return false;
        }
        store_row(o.chunk[c] + start, bits);
    }
    return true;
}

// Decodes K = 1, 2 or 4 blocks of the same size and code in lockstep: a look-up serves two of them at once, and one
// pair's latencies hide behind the other's work.
template <int K>
int decode_lanes(const LaneOutput* o) {
    constexpr int pairs = (K + 1) / 2;
    Reader reader[2 * pairs];
    __m512i base[pairs];
    __mmask64 single[pairs] = {};
    bool fields_only = o[0].coding == kFixed, any_single = false;
    for (int k = 0; k < K; k++) {
        if (int error = reader[k].start(o[k])) return error;
        __mmask64 half = __mmask64(0xffffffffu) << (k % 2 * 32);
        base[k / 2] = k % 2 ? _mm512_mask_set1_epi8(base[k / 2], half, char(o[k].base)) : _mm512_set1_epi8(char(o[k].base));
        if (o[k].single) single[k / 2] |= half;
        any_single |= o[k].single;
        fields_only &= o[k].rest == 0;
    }
    const ByteTable symbols(o[0].table->symbol), consumed(o[0].table->consumed);
    const int rows = (o[0].n + kLanes - 1) / kLanes;
    for (int row = 0; row < rows; row++) {
        const __mmask32 here = lanes_here(o[0].n, row);
        o[0].prefetch.lines(row);
        for (int p = 0; p < pairs; p++) {
            const bool two = 2 * p + 1 < K;
            Reader* r = reader + 2 * p;
            const LaneOutput* out = o + 2 * p;
            __m512i index = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(r[0].x));
            if (two) index = _mm512_inserti64x4(index, _mm512_cvtepi16_epi8(r[1].x), 1);
            __m512i symbol = symbols[index], length = consumed[index];
            __m512i e = _mm512_add_epi8(symbol, base[p]);
            e = _mm512_mask_add_epi8(e, _mm512_cmplt_epu8_mask(e, symbol), e, _mm512_set1_epi8(1));
            e = _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(symbol, symbol), e);
            __mmask64 escaped = _mm512_movepi8_mask(length);
            length = _mm512_and_si512(length, _mm512_set1_epi8(15));
            if (__builtin_expect(any_single, 0)) {
                e = _mm512_mask_mov_epi8(e, single[p], base[p]);
                length = _mm512_mask_mov_epi8(length, single[p], _mm512_setzero_si512());
                escaped &= ~single[p];
            }
            if (__builtin_expect(here != ~__mmask32(0), 0)) {
                __mmask64 both = here | __mmask64(here) << 32;
                e = _mm512_maskz_mov_epi8(both, e);
                length = _mm512_maskz_mov_epi8(both, length);
                escaped &= both;
            }
            if (!r[0].drop(widen(low_half(length)))) return GZ_BAD_LANES;
            if (two && !r[1].drop(widen(high_half(length)))) return GZ_BAD_LANES;
            if (!two) escaped &= 0xffffffffu;
            if (__builtin_expect(escaped != 0, 0)) {
                for (int k = 0; k < 1 + two; k++) {
                    __mmask32 mine = __mmask32(k ? escaped >> 32 : escaped);
                    if (!mine) continue;
                    __m256i raw;
                    if (!out[k].escapes || !r[k].pop(_mm256_maskz_set1_epi8(mine, 8), &raw)) return GZ_BAD_LANES;
                    __m256i row_e = _mm256_mask_mov_epi8(k ? high_half(e) : low_half(e), mine, raw);
                    e = k ? _mm512_inserti64x4(e, row_e, 1) : _mm512_inserti64x4(e, row_e, 0);
                }
            }
            store_row(out[0].exponent + row * kLanes, low_half(e));
            if (two) store_row(out[1].exponent + row * kLanes, high_half(e));
            if (fields_only) continue;
            if (!decode_row(out[0], r[0], row, low_half(e), here)) return GZ_BAD_LANES;
            if (two && !decode_row(out[1], r[1], row, high_half(e), here)) return GZ_BAD_LANES;
        }
    }
    for (int k = 0; k < K; k++)
        if (!reader[k].done()) return GZ_BAD_LANES;
    return 0;
}

}  // namespace avx512
}  // namespace
}  // namespace gz
#endif
