// The codec noise (docs/format.md, "Noise"): constants, and what its engines for all instruction sets share.
#ifndef GRADZIP_NOISE_H
#define GRADZIP_NOISE_H

#include "layout.h"
#include "noise_tables.h"

namespace gz {
namespace noise {

constexpr int kBlock = 8192, kRow = 128, kRows = kBlock / kRow, kLanes = 16;
constexpr int kAlign = 32;        // every part starts at a multiple of so many values
constexpr int kBodyHead = 16, kBlockHead = 4;
constexpr int kLimit = 12;        // bits of the longest code
constexpr int kEscape = 15, kRaw = 255, kGiant = -128;
constexpr int kWithoutLow = 16;   // classes below have no low bits
constexpr int kWide = kWithoutLow + 12;  // the first class with 4 low bits
constexpr int kNarrowMost = 119, kWideMost = 32767;
constexpr int kMostNotch = 127;
constexpr int kPoisoned = 1;
constexpr int kSumBlock = 4096;   // terms of a sum of squares that are added in 32 lanes
constexpr uint32_t kNaN = 0x7fc00000;
constexpr int kLaneRoom = kRows * 4 * kLimit / 8 + 16;  // bytes of the longest lane, and what a 64-bit store runs over
constexpr int kOverrun = kRows * 4 * kLimit / 8 + 16;   // a damaged lane is read so far beyond its start

// The longest block before it is found to be longer than a raw one: head, mask, lengths, planes, lanes and lists.
constexpr int kBlockRoom = kBlockHead + 8 + 32 + kRow / 8 * 8 * kRows + kLanes * kLaneRoom + 5 * kBlock + kOverrun;

inline int low_bits(int number) { return number < kWithoutLow ? 0 : 1 + (number - kWithoutLow) / 4; }
inline int table_of(int number) { return number < kWithoutLow ? number : kWithoutLow + (number - kWithoutLow) % 4; }
inline uint64_t padded(uint64_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

// One code, ready for both directions.
struct alignas(64) Table {
    uint8_t low[256];      // of each pair: the low 8 bits of its code, first bit lowest
    uint8_t high[256];     // the code's other bits | length << 4
    uint16_t code[256];
    uint8_t length[256];
    uint16_t entry[1 << kLimit];  // by the next bits of a lane: length | pair << 8
};
const Table& table(int number);

// How to round the values of one part.
struct Rounding {
    float scale;           // one over the level in use; 0: all integers are 0
    uint32_t key, add;     // of the draws: mix(index ^ key) + add
    uint32_t first;        // index of the first value
    const int8_t* shape;   // NULL: none
};

struct Giant {
    int at;                // in the block
    float q;
};

// What the block after the one at work is made of. Rounding and coding fetch it into the cache in small pieces, so that the
// memory works all the time: the processor's own prefetching begins anew with every block.
struct Ahead {
    static constexpr int kMost = 64;  // ranges; further ones are not fetched
    struct {
        const uint8_t* x;
        const int8_t* shape;  // NULL: none
        int n;                // values
    } range[kMost];
    int count, next;
    const uint8_t* x;
    const int8_t* shape;
    int left;

    void clear() { count = next = left = 0; }
    void add(const uint8_t* values, const int8_t* shapes, int n) {
        if (count < kMost) range[count++] = {values, shapes, n};
    }
    // Fetches the next 64 values; called twice for each row.
    inline void fetch() {
        if (left <= 0) {
            if (next == count) return;
            x = range[next].x;
            shape = range[next].shape;
            left = range[next++].n;
        }
        for (int line = 0; line < 4; line++) __builtin_prefetch(x + 64 * line, 0, 3);
        if (shape) {
            __builtin_prefetch(shape, 0, 2);
            shape += 64;
        }
        x += 256;
        left -= 64;
    }
};

// The sum of (q 2^d)^2 over some values, for those who want to know how large the decoded ones are. Squares of up to 119 are
// exact, so that only the order of a lane's terms counts: value i of a part in a block belongs to lane i % 32.
struct alignas(64) Squares {
    float lane[32];
    double large;  // of integers above 119, in their order
    bool finite;   // whether all decoded values are
};

// Room for one block at work; one per thread.
struct alignas(64) Work {
    int8_t q[kBlock];               // integers; kGiant for giants
    GZ_GUARD(1)
    int8_t other[kBlock];           // those of the block before, while they are delivered
    GZ_GUARD(10)
    int8_t used[kBlock];            // those of the coded rows
    GZ_GUARD(2)
    uint8_t pairs[kBlock / 2];
    GZ_GUARD(3)
    uint16_t entries[kBlock / 2];
    GZ_GUARD(4)
    uint64_t escaped[kBlock / 64];  // a bit for each value of the coded rows
    GZ_GUARD(11)
    uint8_t escapes[kBlock + 64];   // their list; stores run over its end
    GZ_GUARD(5)
    uint8_t lanes[kLanes][kLaneRoom];
    int length[kLanes];
    GZ_GUARD(6)
    Giant giants[kBlock];
    int giant_count;
    GZ_GUARD(7)
    float wide[kBlock];             // integers as floats, where 8 bits do not hold them
    GZ_GUARD(8)
    float sum[kBlock];
    GZ_GUARD(9)
    uint8_t block[kBlockRoom];
    Ahead ahead;
    Squares squares;
};

enum Delivery { kPut, kAdd, kDivide };

// Where decoded values go.
struct Target {
    uint8_t* out;           // float32 at any address
    const int8_t* shape;    // NULL: none
    float level;            // in use; neither 0 nor NaN
    Delivery delivery;
    float factor;           // what kPut multiplies by: 1, or 1 / divisor where that is a power of two
    float divisor;          // what kDivide divides by
    bool stream;            // bypass the cache
    Squares* squares;       // NULL: nobody asks
};

// A block whose integers are all there, and whose delivery fills the time in which the lanes of the next one are decoded:
// those keep the integer units busy, delivery needs vectors and the memory.
struct Behind {
    const int8_t* q;  // kBlock of them; NULL: there is none
    Target target;    // with kPut
    int done;         // values that are delivered
    double* sum;      // of squares, of its block
};

// The functions that exist once per instruction set.
struct Kernels {
    const char* name;
    // The sum of the squares of up to kSumBlock values in their order; NaN or infinite if a value is.
    double (*squares)(const uint8_t* x, int n);
    // The sum of 4^(d + 12) over a shape.
    uint64_t (*weights)(const int8_t* shape, uint64_t n);
    // The bits of the largest second moment, and the shape that second moments give.
    uint32_t (*largest)(const float* x, uint64_t n);
    void (*shape)(const float* x, uint64_t n, uint32_t largest, int8_t* shape);
    // Integers of n values; giants are noted with `at` as the number of the first value.
    void (*round)(const uint8_t* x, int n, const Rounding& how, int at, Work& work);
    // The sum of magnitudes of whole rows, and which rows are not all 0.
    uint64_t (*scan)(const int8_t* q, int rows, uint64_t* nonzero);
    // Digits in pairs, planes of low bits, and the list of escapes, whose length is returned.
    int (*pack)(const int8_t* q, int rows, int low, int reach, uint8_t* pairs, uint8_t* planes, uint8_t* escapes);
    void (*encode_lanes)(const uint8_t* pairs, int rows, const Table& table, Work& work);
    // Reads all lanes into entries of the table; `bits` says how many each has used. Delivers some of `behind` meanwhile.
    void (*decode_lanes)(const uint8_t* const* lane, int rows, const Table& table, uint16_t* entries, uint64_t* bits,
                         Behind& behind);
    // Entries become integers. Returns how many are escapes.
    int (*unpack)(const uint16_t* entries, int rows, int low, int reach, const uint8_t* planes, int8_t* q, uint64_t* escaped);
    void (*deliver)(const int8_t* q, int n, const Target& target);
    void (*accumulate)(const uint8_t* x, int n, float* sum);
};
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

static inline uint64_t load64(const uint8_t* p) {
    uint64_t v;
    std::memcpy(&v, p, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}
static inline void store64(uint8_t* p, uint64_t v) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    std::memcpy(p, &v, 8);
}

}  // namespace noise
}  // namespace gz
#endif
