// The block coder in the words of vector_avx2.h (or its like), which has to be included before. Included like block.h.

// Large outputs bypass the cache: they will not be read soon, and a plain store would first read what it overwrites.
inline void copy_out(void* out, const void* values, size_t bytes, bool stream) {
    uint8_t* to = static_cast<uint8_t*>(out);
    const uint8_t* from = static_cast<const uint8_t*>(values);
    size_t i = 0;
    if (stream && !(reinterpret_cast<uintptr_t>(to) % kStreamAlignment))
        for (; i + kLanes <= bytes; i += kLanes) stream_bytes(to + i, load(from + i));
    std::memcpy(to + i, from + i, bytes - i);
}

using plain::find_nonzero;

#include "values.h"
#include "lanes_vector.h"
#include "values_vector.h"
#include "near_vector.h"
#include "sample.h"
#include "sparse.h"
#include "block.h"
