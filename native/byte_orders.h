// For each mask of 8 bytes, the order that moves the chosen bytes to the front. A byte shuffle takes such an order: that is
// how processors compress that have no instruction for it.
#ifndef GRADZIP_BYTE_ORDERS_H
#define GRADZIP_BYTE_ORDERS_H

#include <cstdint>

namespace gz {

struct ByteOrders {
    uint64_t front[256];  // 8 indices each, the first in the lowest byte; 0x80 stands for a zero
    uint8_t count[256];   // bytes that are chosen

    constexpr ByteOrders() : front(), count() {
        for (int mask = 0; mask < 256; mask++) {
            uint64_t order = 0x8080808080808080u;
            int found = 0;
            for (int i = 0; i < 8; i++)
                if (mask >> i & 1) order ^= uint64_t(0x80 ^ i) << (8 * found++);
            front[mask] = order;
            count[mask] = uint8_t(found);
        }
    }
};
alignas(64) inline constexpr ByteOrders kByteOrders;

}  // namespace gz
#endif
