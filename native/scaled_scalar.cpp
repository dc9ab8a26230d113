// Block-scaled codes for any processor.
#include "scaled.h"

#include <algorithm>
#include <cstring>

namespace gz {
namespace scaled {
namespace {

#include "scaled_plain.h"

}  // namespace

const Kernels* scalar_kernels() { return &kernels_here; }

}  // namespace scaled
}  // namespace gz
