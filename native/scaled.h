// Block-scaled codes (docs/format.md): what the three instruction sets share.
#ifndef GRADZIP_SCALED_H
#define GRADZIP_SCALED_H
#include <cstdint>

#include "gradzip.h"

namespace gz {
namespace scaled {

enum Kind { kInt8 = 0, kInt4 = 1, kFp8 = 2 };
constexpr int kMostBlock = 256, kAlign = 32;

struct Form {
    int kind, block;
    bool hadamard;
    float most;
    uint32_t largest_scale;  // bfloat16 bits
};

// The functions that exist once per instruction set; a block has n <= form.block values, the last one of a part fewer.
struct Kernels {
    // Adds a block of a frame to x, or puts it there. i: index of its first value in the tensor.
    void (*decode)(const Form& form, const uint8_t* scale, const uint8_t* codes, int n, uint32_t i, uint64_t signs,
                   bool add, float* x);
    void (*encode)(const Form& form, const float* x, int n, uint32_t i, uint64_t key, uint32_t offset, uint64_t signs,
                   uint8_t* scale, uint8_t* codes);
    // x += y, one NaN for all; x /= divisor, if that is above 1.
    void (*add)(const float* y, int n, float* x);
    void (*divide)(float divisor, int n, float* x);
};
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace scaled
}  // namespace gz
#endif
