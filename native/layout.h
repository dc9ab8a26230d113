// The constants of docs/format.md, and what the block coders of all instruction sets share.
#ifndef GRADZIP_LAYOUT_H
#define GRADZIP_LAYOUT_H

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gradzip.h"

namespace gz {

constexpr int kBlock = 4096;
constexpr int kLanes = 32;
constexpr int kSegmentBlocks = 32;
constexpr uint64_t kSegment = uint64_t(kBlock) * kSegmentBlocks;
constexpr int kTableBytes = 128;
constexpr int kBodyHead = 8;
constexpr int kDenseHead = 4 + 2 * kLanes;
constexpr int kSampleRows = 16;
constexpr int kExact = -128;
constexpr int kEscape = 256;

enum Coding { kFixed = 0, kNear = 1, kPaper = 2 };
enum Kind { kRaw = 0, kDense = 1, kSparse = 2 };

struct FloatLayout {
    int item_bytes, exponent_bits, field_bits;
};
inline FloatLayout float_layout(int dtype) {
    if (dtype == GZ_FLOAT32) return {4, 8, 24};
    if (dtype == GZ_BFLOAT16) return {2, 8, 8};
    return {2, 5, 11};
}

// One Huffman code, ready for both directions. Symbols without a code have the escape's code and kEscaped set.
constexpr uint8_t kEscaped = 0x80;
struct alignas(64) CodeTable {
    uint8_t code[256];     // bit-reversed
    uint8_t length[256];   // | kEscaped
    uint8_t symbol[256];   // by the low 8 bits of a state
    uint8_t consumed[256];  // length of that symbol's code, | kEscaped for the escape
};
// False if the lengths are no complete code.
bool build_table(const uint8_t* lengths, CodeTable* table);
void code_lengths(const int64_t* counts, int limit, uint8_t* lengths);

// Room for one block at work; one per thread. Arrays are padded so that vector loads may run over a block's end.
constexpr int kRoom = kBlock + 64;
constexpr size_t kMaxDense = kDenseHead + kBlock * 7 + 256;  // 50 bits per value at the worst, and vector overshoot
struct alignas(64) Scratch {
    uint32_t mapped[kRoom];
    uint8_t exponent[kRoom];
    uint8_t width[kRoom];     // bits that go through the lane
    uint8_t chunk[3][kRoom];  // those bits
    uint8_t level[kRoom];
    uint8_t plane[3][kRoom];
    int8_t floor[kRoom];
    uint8_t frame[kMaxDense];
    float sum[kRoom];
};

// Everything that encoding one block needs to know.
struct BlockIn {
    const void* values;  // in memory order, of job.dtype
    int n;
    gz_job job;
    Coding coding;
    const int8_t* floor;  // n floors with the shift applied, or NULL
    const CodeTable* table;
};

// What a block became: written to `out`, which has room for kMaxDense bytes.
struct BlockOut {
    Kind kind;
    int bytes;
};

struct BlockData {
    const uint8_t* data;
    int size;
    Kind kind;
    bool padded;  // 64 readable bytes follow the data
};

// The functions that exist once per instruction set.
struct Kernels {
    const char* name;
    BlockOut (*encode_block)(const BlockIn& in, uint8_t* out, Scratch& scratch);
    // Decodes two blocks of the same frame at once (the second may be absent: n[1] = 0). Returns 0 or a gz_error.
    int (*decode_pair)(const BlockData block[2], const int n[2], int dtype, Coding coding, const CodeTable* table[2],
                       const int8_t* floor[2], void* out[2], bool add, bool stream, Scratch scratch[2]);
    void (*sample_block)(const BlockIn& in, int64_t* counts, Scratch& scratch);
    void (*floors)(const gz_floor& rule, uint64_t start, int n, int shift, int8_t* out);
};
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

inline void store16(uint8_t* p, unsigned v) {
    p[0] = uint8_t(v);
    p[1] = uint8_t(v >> 8);
}
inline unsigned load16(const uint8_t* p) { return p[0] | unsigned(p[1]) << 8; }
inline void store32(uint8_t* p, uint32_t v) {
    store16(p, v & 0xffff);
    store16(p + 2, v >> 16);
}
inline uint32_t load32(const uint8_t* p) { return load16(p) | uint32_t(load16(p + 2)) << 16; }

}  // namespace gz
#endif
