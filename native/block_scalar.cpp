// The block coder for any processor.
#include "lanes.h"

namespace gz {
namespace {
namespace scalar {

using plain::encode_lanes;

#include "stages.h"
#include "sample.h"
#include "sparse.h"
#include "block.h"

}  // namespace scalar
}  // namespace

const Kernels* scalar_kernels() {
    static const Kernels kernels{"scalar", scalar::encode_block, scalar::decode_group, scalar::sample_block,
                                 scalar::floors, scalar::round_block, scalar::lost_of_block, scalar::divide};
    return &kernels;
}

}  // namespace gz
