// For each mask of 8 bytes, the order that moves the chosen bytes to the front, and the one that moves them back. A byte
// shuffle takes such an order, so that processors without compress and expand instructions have them, too.
#ifndef GRADZIP_BYTE_ORDERS_H
#define GRADZIP_BYTE_ORDERS_H

#include <cstdint>

namespace gz {

struct ByteOrders {
    uint64_t front[256], back[256];  // 8 indices each, the first in the lowest byte; 0x80 stands for a zero

    constexpr ByteOrders() : front(), back() {
        for (int mask = 0; mask < 256; mask++) {
            uint64_t to_front = 0x8080808080808080u, to_back = 0x8080808080808080u;
            int found = 0;
            for (int i = 0; i < 8; i++)
                if (mask >> i & 1) {
                    to_front ^= uint64_t(0x80 ^ i) << (8 * found);
                    to_back ^= uint64_t(0x80 ^ found) << (8 * i);
                    found++;
                }
            front[mask] = to_front;
            back[mask] = to_back;
        }
    }
};
alignas(64) inline constexpr ByteOrders kByteOrders;

}  // namespace gz
#endif
