// Block-scaled codes for AVX-512.
#include "scaled.h"

#include <algorithm>
#include <cstring>

namespace gz {
namespace scaled {
namespace {

#include "scaled_plain.h"

}  // namespace

const Kernels* avx512_kernels() { return &kernels_here; }

}  // namespace scaled
}  // namespace gz
