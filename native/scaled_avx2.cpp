// Block-scaled codes for AVX2.
#include "scaled.h"

#include <algorithm>
#include <cstring>

namespace gz {
namespace scaled {
namespace {

#include "scaled_plain.h"

}  // namespace

const Kernels* avx2_kernels() { return &kernels_here; }

}  // namespace scaled
}  // namespace gz
