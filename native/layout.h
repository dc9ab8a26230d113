// The constants of docs/format.md, and what the block coders of all instruction sets share.
#ifndef GRADZIP_LAYOUT_H
#define GRADZIP_LAYOUT_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gradzip.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace gz {

constexpr int kBlock = 4096;
constexpr int kLanes = 32;
constexpr int kSegmentBlocks = 32;
constexpr uint64_t kSegment = uint64_t(kBlock) * kSegmentBlocks;
constexpr int kTableBytes = 128;
constexpr int kBodyHead = 8;
constexpr int kDenseHead = 4 + 2 * kLanes;
constexpr int kSampleRows = 16;
constexpr int kSampled = kBlock / kSampleRows;
constexpr int kFewSampled = 64;  // one histogram will do
constexpr int kExact = -128;
constexpr int kCoarsest = 103;  // floors above are taken as this one
constexpr int kEscape = 256;

enum Coding { kFixed = 0, kNear = 1, kPaper = 2 };
enum Kind { kRaw = 0, kDense = 1, kSparse = 2 };

struct FloatLayout {
    int item_bytes, exponent_bits, field_bits;
};
static inline FloatLayout float_layout(int dtype) {
    if (dtype == GZ_FLOAT32) return {4, 8, 24};
    if (dtype == GZ_BFLOAT16) return {2, 8, 8};
    return {2, 5, 11};
}

// One Huffman code, ready for both directions. Symbols without a code have the escape's code and kEscaped set.
constexpr uint8_t kEscaped = 0x80;
constexpr uint8_t kZero = 0x40;
struct alignas(64) CodeTable {
    uint8_t code[256];     // bit-reversed
    uint8_t length[256];   // | kEscaped
    uint8_t symbol[256];   // by the low 8 bits of a state
    uint8_t consumed[256];  // length of that symbol's code, | kEscaped for the escape, | kZero for symbol 0
    uint8_t distance[256];  // what that symbol adds to the base, + 128, where all exponents are near it:
    int lowest, highest;    // the least and the largest that occur
    uint16_t entry[256];    // code | length << 8, by symbol
};

// The symbols that have a code, in ascending order, with its length.
struct Code {
    int count;
    uint8_t symbol[256], length[256];

    void read(const uint8_t* lengths);       // of all 256 symbols
    void read_packed(const uint8_t* table);  // as a frame has them
    void write_packed(uint8_t* table) const;
    int escape() const;  // the length that is left for the escape; -1 if the code is not complete

   private:
    void add(int number, int bits) {
        symbol[count] = uint8_t(number);
        length[count++] = uint8_t(bits);
    }
};

// Which half of a table is filled.
enum Use { kEncodes = 1, kDecodes = 2, kBoth = 3 };
// False if the lengths are no complete code.
bool build_table(const Code& code, CodeTable* table, Use use);
bool build_table(const uint8_t* lengths, CodeTable* table, Use use);
void code_lengths(const int64_t* counts, int limit, uint8_t* lengths);
void code_lengths(const uint32_t* counts, int limit, uint8_t* lengths);

// Under the address sanitizer the arrays of Scratch have poison between them, or it would not see one run into the next.
#if defined(__SANITIZE_ADDRESS__)
struct alignas(64) Guard {
    uint8_t bytes[4096];
    Guard() { __asan_poison_memory_region(bytes, sizeof bytes); }
    ~Guard() { __asan_unpoison_memory_region(bytes, sizeof bytes); }
};
#define GZ_GUARD(number) Guard guard##number;
#else
#define GZ_GUARD(number)
#endif

// Room for one block at work; one per thread. Arrays are padded so that vector loads may run over a block's end.
constexpr int kRoom = kBlock + 64;
constexpr size_t kMaxDense = kDenseHead + kBlock * 7 + 256;  // 50 bits per value at the worst, and vector overshoot
struct alignas(64) Scratch {
    uint32_t mapped[kRoom];
    uint32_t part[kRoom];     // lane bits, before they are cut into chunks
    uint32_t wide[kRoom];     // what will be narrowed to bytes
    GZ_GUARD(1)
    uint8_t exponent[kRoom];
    GZ_GUARD(2)
    uint8_t width[kRoom];     // bits that go through the lane
    GZ_GUARD(3)
    uint8_t chunk[3][kRoom];  // those bits
    GZ_GUARD(4)
    uint8_t level[kRoom];
    GZ_GUARD(5)
    uint8_t plane[3][kRoom];
    GZ_GUARD(6)
    int8_t floor[kRoom];
    GZ_GUARD(7)
    uint8_t frame[kMaxDense];
    GZ_GUARD(8)
    float sum[kRoom];
};

// Where a block's floors come from; those of near and paper mode only.
struct FloorSource {
    const gz_floor* rule;
    uint64_t start;  // the number of the block's first value
    int shift;
};

// What is read soon, to be fetched ahead; NULL-terminated.
struct Ahead {
    const uint8_t* next[3];    // what the next block, or group of blocks, will read
    const uint8_t* sample[3];  // kSampleAhead blocks whose sampled rows will be read
};
constexpr int kSampleAhead = 4;  // so that the last quarter of a segment fetches the sample of the next: earlier would be too early

// What the sampled rows of a block say.
struct Sample {
    int base;
    int nonzero;  // exponents that are not 0
    bool alike;   // all exponents are equal
};

// Everything that encoding one block needs to know.
struct BlockIn {
    const void* values;  // in memory order, of job.dtype
    int n;
    gz_job job;
    Coding coding;
    FloorSource floors;
    const CodeTable* table;
    Ahead ahead;
    const Sample* sample;  // NULL: not taken yet
    const int8_t* floor;  // n floors with the shift applied, once they are made
};

// What a block became.
struct BlockOut {
    Kind kind;
    int bytes;
};

// One block to decode.
constexpr int kGroup = 4;  // so many are decoded in lockstep
struct BlockData {
    const uint8_t* data;  // 64 readable bytes follow it
    int size;
    Kind kind;
    int n;
    const CodeTable* table;
    FloorSource floors;
};

// Where decoded values go.
struct Target {
    void* out;
    bool add;     // add to what is there
    bool stream;  // bypass the cache: the output is larger than it
};

// The functions that exist once per instruction set.
struct Kernels {
    const char* name;
    // Encodes one block to `out`, which has room for kMaxDense bytes.
    BlockOut (*encode_block)(const BlockIn& in, uint8_t* out, Scratch& scratch);
    // Decodes up to kGroup blocks of one segment. Returns 0 or a gz_error.
    int (*decode_group)(const BlockData* block, int count, int dtype, Coding coding, const Target* target, const Ahead& ahead,
                        Scratch* scratch);
    // Adds the sampled symbols of a block to the sum of four histograms, where there are any.
    Sample (*sample_block)(const BlockIn& in, uint32_t (*counts)[256], Scratch& scratch);
    void (*floors)(const gz_floor& rule, uint64_t start, int n, int shift, int8_t* out);
    // What decoding an encoded block gives, without coding it.
    void (*round)(const BlockIn& in, const Target& target, Scratch& scratch);
    // What coding a block of float32 loses, divided by `scale`.
    void (*lost)(const BlockIn& in, float scale, void* out, Scratch& scratch);
    // Divides n float32 at any address, in place.
    void (*divide)(void* values, uint64_t n, float divisor);
};
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

static inline void store16(uint8_t* p, unsigned v) {
    p[0] = uint8_t(v);
    p[1] = uint8_t(v >> 8);
}
static inline unsigned load16(const uint8_t* p) { return p[0] | unsigned(p[1]) << 8; }
static inline void store32(uint8_t* p, uint32_t v) {
    store16(p, v & 0xffff);
    store16(p + 2, v >> 16);
}
static inline uint32_t load32(const uint8_t* p) { return load16(p) | uint32_t(load16(p + 2)) << 16; }

// Values lie at any address, and the same ones are looked at as floats and as bits.
template <typename Word>
static inline Word value_at(const void* values, int i) {
    Word value;
    std::memcpy(&value, static_cast<const uint8_t*>(values) + size_t(i) * sizeof(Word), sizeof(Word));
    return value;
}
template <typename Word>
static inline void put_value(void* values, int i, Word value) {
    std::memcpy(static_cast<uint8_t*>(values) + size_t(i) * sizeof(Word), &value, sizeof(Word));
}

}  // namespace gz
#endif
