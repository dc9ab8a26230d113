// The lanes of a dense block: 32 stacks of bits with one refill stream (docs/format.md, "Lanes").
// This is the plain form; lanes_avx512.h does the same with vectors.
#ifndef GRADZIP_LANES_H
#define GRADZIP_LANES_H

#include "layout.h"

namespace gz {
// Everything here is compiled once per instruction set: the unnamed namespace keeps the linker from merging the copies.
namespace {

// What the next block will need, fetched while the lanes of this one are busy: `each` cache lines of every stream at
// each of the loop's steps. Hardware prefetchers stop at page ends, which come four times in a block.
struct Prefetch {
    const uint8_t* const* stream = nullptr;
    int each = 4;
    // Inlined by force: gcc takes a function that does nothing but this for one without effect, and drops the call.
    __attribute__((always_inline)) void lines(int step) const {
        for (int i = 0; i < 3 && stream && stream[i]; i++)
            for (int line = 0; line < each; line++) __builtin_prefetch(stream[i] + 64 * (step * each + line), 0, 2);
    }
};

// The rows of later blocks that will be sampled: they lie too far apart for the hardware to guess.
__attribute__((always_inline)) inline void fetch_sample(const Ahead& ahead, size_t item) {
    for (int i = 0; i < 3 && ahead.sample[i]; i++)
        for (size_t row = 0; row < kSampleAhead * kBlock * item; row += kSampleRows * kLanes * item)
            for (size_t line = 0; line < kLanes * item; line += 64) __builtin_prefetch(ahead.sample[i] + row + line, 0, 2);
}

// What goes into the lanes, one entry per value.
struct LaneInput {
    int n;
    const CodeTable* table;
    bool single;              // all exponents equal base: no symbols
    int base;
    const uint8_t* exponent;
    const uint8_t* level;     // paper mode, else NULL
    int chunks;               // highest chunk that occurs: 0-3
    const uint8_t* width;     // lane bits of each value; unused if chunks = 0
    const uint8_t* chunk[3];
    Prefetch prefetch;
};

// What encoding leaves behind: the end of the refill stream, and whether there were escapes.
struct LaneEnd {
    uint8_t* refill;
    bool escapes;
};

// What comes out of the lanes, and where it is read from.
struct LaneOutput {
    int n;
    const CodeTable* table;
    bool single, escapes, pruned;
    int base;
    Coding coding;
    int rest;                 // lane bits of each field, for kFixed
    const int8_t* floor;      // for kNear
    const uint8_t* states;
    const uint8_t* refill;    // its first byte
    const uint8_t* end;       // behind its last byte
    uint8_t* exponent;
    uint8_t* level;
    uint8_t* width;           // lane bits of each value, for kNear
    uint8_t* chunk[3];
    Prefetch prefetch;
};

inline int clamp_bits(int bits) { return bits < 0 ? 0 : bits > 8 ? 8 : bits; }

inline uint8_t symbol_of(int exponent, int base) {
    return exponent == 0 ? 0 : uint8_t(exponent - base - (exponent <= base));
}
inline uint8_t exponent_of(int symbol, int base) {
    int sum = symbol + base;
    return symbol == 0 ? 0 : uint8_t(sum + (sum > 255));
}
// The entries of a table by exponent. Symbols are exponents turned round the base, so two copies do it.
inline void entries_by_exponent(const CodeTable& table, int base, uint16_t* entries) {
    entries[0] = table.entry[0];
    std::memcpy(entries + 1, table.entry + 256 - base, size_t(base) * 2);
    std::memcpy(entries + 1 + base, table.entry + 1, size_t(255 - base) * 2);
}
inline int kept_near(int exponent, int floor) {
    if (floor == kExact || exponent == 255) return 23;
    int kept = exponent - 127 - floor;
    return kept < 0 ? 0 : kept > 23 ? 23 : kept;
}

namespace plain {

// Positions of the non-zero exponents; most of a sparse block is skipped eight values at a time.
inline int find_nonzero(const uint8_t* exponent, int n, uint16_t* position) {
    int found = 0;
    for (int i = 0; i < n; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, exponent + i, 8);
        if (n - i < 8) eight &= (uint64_t(1) << (8 * (n - i))) - 1;
        while (eight) {
            int byte = __builtin_ctzll(eight) / 8;
            position[found++] = uint16_t(i + byte);
            eight &= ~(uint64_t(255) << (8 * byte));
        }
    }
    return found;
}

struct Lane {
    static void push(uint32_t& x, uint32_t bits, int count, uint8_t*& out) {
        uint32_t full = (x << count) >> 16 != 0;
        *out = uint8_t(x);
        out += full;
        x >>= 8 * full;
        x = x << count | bits;
    }
};

// `out` needs one byte of slack.
inline LaneEnd encode_lanes(const LaneInput& in, uint8_t* states, uint8_t* out) {
    uint32_t x[kLanes];
    for (uint32_t& state : x) state = 256;
    uint16_t code_of[256];
    entries_by_exponent(*in.table, in.base, code_of);
    uint32_t any_escape = 0;
    for (int row = (in.n - 1) / kLanes; row >= 0; row--) {
        int start = row * kLanes, here = in.n - start < kLanes ? in.n - start : kLanes;
        for (int c = in.chunks - 1; c >= 0; c--)
            for (int j = 0; j < here; j++)
                Lane::push(x[j], in.chunk[c][start + j], clamp_bits(in.width[start + j] - 8 * c), out);
        if (in.level)
            for (int j = 0; j < here; j++)
                if (in.exponent[start + j]) Lane::push(x[j], in.level[start + j], 2, out);
        if (in.single) continue;
        uint32_t escaped = 0;
        for (int j = 0; j < here; j++) escaped |= code_of[in.exponent[start + j]];
        if (escaped & (kEscaped << 8)) {
            any_escape = 1;
            for (int j = 0; j < here; j++)
                if (code_of[in.exponent[start + j]] & (kEscaped << 8)) Lane::push(x[j], in.exponent[start + j], 8, out);
        }
        for (int j = 0; j < here; j++) {
            uint32_t entry = code_of[in.exponent[start + j]];
            Lane::push(x[j], entry & 255, entry >> 8 & 15, out);
        }
    }
    for (int j = 0; j < kLanes; j++) store16(states + 2 * j, x[j]);
    return {out, any_escape != 0};
}

// The lanes pop, the highest lane first, because the refill stream is read backwards. At most 32 bytes are taken per
// call, and a dense head of 68 bytes lies before the stream: running dry is safe and noticed afterwards.
template <typename Count, typename Sink>
inline const uint8_t* pop(uint32_t* x, int lanes, const uint8_t* at, Count count, Sink sink) {
    for (int j = lanes - 1; j >= 0; j--) {
        int bits = count(j);
        sink(j, x[j] & ((1u << bits) - 1));
        uint32_t rest = x[j] >> bits, low = (rest - 256) >> 31;  // arithmetic, because a branch would be a coin toss
        x[j] = rest << (8 * low) | (at[-1] & (0u - low));
        at -= low;
    }
    return at;
}

inline int decode_lanes(const LaneOutput& o) {
    uint32_t x[kLanes];
    for (int j = 0; j < kLanes; j++) {
        x[j] = load16(o.states + 2 * j);
        if (x[j] < 256) return GZ_BAD_DENSE;
    }
    // Exponent and code length by the low bits of a state, so that the inner loop has one look-up.
    uint16_t entry_of[256];
    for (int i = 0; i < 256; i++)
        entry_of[i] = uint16_t(exponent_of(o.table->symbol[i], o.base) | o.table->consumed[i] << 8);
    const uint8_t* at = o.end;
    for (int start = 0; start < o.n; start += kLanes) {
        const int here = o.n - start < kLanes ? o.n - start : kLanes;
        uint8_t* e = o.exponent + start;
        if (o.single) {
            std::memset(e, o.base, size_t(here));
        } else {
            uint32_t seen = 0;
            bool escaped[kLanes];
            at = pop(
                x, here, at,
                [&](int j) {
                    uint32_t entry = entry_of[x[j] & 255];
                    e[j] = uint8_t(entry);
                    escaped[j] = entry & (kEscaped << 8);
                    seen |= entry;
                    return int(entry >> 8 & 15);
                },
                [](int, uint32_t) {});
            if (seen & (kEscaped << 8)) {
                if (at < o.refill || !o.escapes) return GZ_BAD_LANES;
                at = pop(
                    x, here, at, [&](int j) { return escaped[j] ? 8 : 0; },
                    [&](int j, uint32_t bits) { e[j] = escaped[j] ? uint8_t(bits) : e[j]; });
            }
            if (at < o.refill) return GZ_BAD_LANES;
        }
        if (o.coding == kFixed) {
            if (!o.rest) continue;
            at = pop(
                x, here, at, [&](int j) { return e[j] || !o.pruned ? o.rest : 0; },
                [&](int j, uint32_t bits) { o.chunk[0][start + j] = uint8_t(bits); });
            if (at < o.refill) return GZ_BAD_LANES;
            continue;
        }
        if (o.coding == kPaper) {
            at = pop(
                x, here, at, [&](int j) { return e[j] ? 2 : 0; },
                [&](int j, uint32_t bits) { o.level[start + j] = uint8_t(bits); });
            if (at < o.refill) return GZ_BAD_LANES;
        }
        int width[kLanes], widest = 0;
        for (int j = 0; j < here; j++) {
            int kept = o.coding == kNear ? kept_near(e[j], o.floor[start + j]) : 23 - 6 * o.level[start + j];
            width[j] = e[j] ? 1 + kept : 0;
            o.width[start + j] = uint8_t(width[j]);
            widest = width[j] > widest ? width[j] : widest;
        }
        for (int c = 0; c < 3; c++) {
            if (widest <= 8 * c) {
                std::memset(o.chunk[c] + start, 0, size_t(here));
                continue;
            }
            at = pop(
                x, here, at, [&](int j) { return clamp_bits(width[j] - 8 * c); },
                [&](int j, uint32_t bits) { o.chunk[c][start + j] = uint8_t(bits); });
            if (at < o.refill) return GZ_BAD_LANES;
        }
    }
    for (int j = 0; j < kLanes; j++)
        if (x[j] != 256) return GZ_BAD_LANES;
    return at == o.refill ? 0 : GZ_BAD_LANES;
}

}  // namespace plain
}  // namespace
}  // namespace gz
#endif
