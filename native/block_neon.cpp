// The block coder for NEON, which every AArch64 processor has.
#include "lanes.h"
#include "vector_neon.h"

namespace gz {
namespace {
namespace neon {

#include "block_vector.h"

}  // namespace neon
}  // namespace

const Kernels* neon_kernels() {
    static const Kernels kernels{"neon", neon::encode_block, neon::decode_group, neon::sample_block,
                                 neon::fast_floors, neon::round_block, neon::lost_of_block, neon::divide};
    return &kernels;
}

}  // namespace gz
