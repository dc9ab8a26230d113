// What the entry points of body.cpp and frames.cpp share: the layout of a body, threads, and bodies that are read.
#ifndef GRADZIP_BODY_H
#define GRADZIP_BODY_H

#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "layout.h"

namespace gz {

const Kernels* kernels();  // of the instruction set in use

// --- Layout ---

inline uint64_t blocks_of(uint64_t n) { return (n + kBlock - 1) / kBlock; }
inline uint64_t segments_of(uint64_t n) { return (n + kSegment - 1) / kSegment; }
inline uint64_t index_offset(uint64_t n, bool book) { return kBodyHead + (book ? 0 : segments_of(n) * kTableBytes); }
inline uint64_t blocks_offset(uint64_t n, bool book) { return index_offset(n, book) + (2 * blocks_of(n) + 3) / 4 * 4; }

inline Coding coding_of(const gz_job& job) {
    if (job.dtype != GZ_FLOAT32) return kFixed;
    return job.mode == GZ_NEAR ? kNear : job.mode == GZ_PAPER ? kPaper : kFixed;
}

inline bool valid(const gz_job& job, uint64_t n, const gz_floor* floor) {
    bool needs_floor = coding_of(job) != kFixed && n > 0;
    return job.dtype >= 0 && job.dtype <= GZ_FLOAT16 && job.mode >= 0 && job.mode <= GZ_PAPER && job.keep >= 0 &&
           job.keep <= 23 && job.limit >= 1 && job.limit <= 8 && job.shift >= 0 && job.shift <= 127 &&
           (!needs_floor || (floor && (floor->given || floor->theta)));
}

inline Scratch* scratch() {  // room for a group of blocks per thread
    static thread_local std::unique_ptr<Scratch[]> room(new Scratch[kGroup]());
    return room.get();
}

// One block's view of the input.
struct Source {
    const gz_job& job;
    const void* x;
    uint64_t n;
    const gz_floor* floor;
    const Kernels* kernels;

    const uint8_t* values_at(uint64_t start) const {
        return static_cast<const uint8_t*>(x) + start * uint64_t(float_layout(job.dtype).item_bytes);
    }
    BlockIn block(uint64_t number, const CodeTable* table) const {
        uint64_t start = number * kBlock;
        int count = int(std::min<uint64_t>(kBlock, n - start));
        return {values_at(start), count, job, coding_of(job), {floor, start, job.shift}, table, {}, nullptr, nullptr};
    }
    // The streams from which whole blocks come; none if there are no such blocks.
    void streams(uint64_t number, int count, const uint8_t* stream[3]) const {
        const uint64_t start = number * kBlock;
        if (start + uint64_t(count) * kBlock > n) return;
        stream[0] = values_at(start);
        if (coding_of(job) == kFixed || floor->given) return;
        stream[1] = reinterpret_cast<const uint8_t*>(floor->theta + start);
        if (floor->second) stream[2] = reinterpret_cast<const uint8_t*>(floor->second + start);
    }
    void sample_segment(uint64_t segment, uint32_t counts[256], Sample samples[kSegmentBlocks]) const {
        uint64_t first = segment * kSegmentBlocks, last = std::min(blocks_of(n), first + kSegmentBlocks);
        Scratch& room = scratch()[0];
        if (n - first * kBlock <= kFewSampled * kSampleRows) {
            std::memset(counts, 0, 256 * sizeof(uint32_t));
            samples[0] = kernels->sample_block(block(first, nullptr), reinterpret_cast<uint32_t(*)[256]>(counts), room);
            return;
        }
        uint32_t parts[4][256] = {};
        for (uint64_t number = first; number < last; number++)
            samples[number - first] = kernels->sample_block(block(number, nullptr), parts, room);
        for (int k = 0; k < 256; k++) counts[k] = parts[0][k] + parts[1][k] + parts[2][k] + parts[3][k];
    }
};

// Cuts blocks into parts of whole segments, one per thread; small inputs stay in one part.
inline std::vector<uint64_t> parts(uint64_t n, int threads) {
    uint64_t segments = segments_of(n), count = std::max<uint64_t>(1, std::min<uint64_t>(uint64_t(std::max(threads, 1)), segments / 2));
    std::vector<uint64_t> bounds;
    for (uint64_t i = 0; i <= count; i++) bounds.push_back(std::min(segments * i / count * kSegmentBlocks, blocks_of(n)));
    return bounds;
}

// Whether all of it is one part.
inline bool stay_together(uint64_t n, int threads) { return threads <= 1 || segments_of(n) < 4; }

template <typename Work>
void run_parts(size_t count, Work work) {
    std::vector<std::thread> threads;
    for (size_t i = 1; i < count; i++) threads.emplace_back(work, i);
    work(0);
    for (std::thread& t : threads) t.join();
}

// --- Reading ---

struct Body {
    const uint8_t* data;
    uint64_t size, n;
    Coding coding;
    bool book;
    std::vector<CodeTable> tables;  // one per segment
    std::vector<uint64_t> offset;   // one per block, and the end

    void read_code(uint64_t segment, const uint8_t* book_lengths, Code* code) const {
        if (book)
            code->read(book_lengths + 256 * segment);
        else
            code->read_packed(data + kBodyHead + segment * kTableBytes);
    }
    // Checks all but the blocks. Of a body of one block nothing is kept: there may be thousands of them.
    int read(const uint8_t* book_lengths) {
        if (size < kBodyHead) return GZ_TRUNCATED_HEAD;
        bool has_book = load32(data + 4) != 0;
        if (data[0] > kPaper || data[1] > 1 || data[2] || data[3] || has_book != bool(data[1])) return GZ_BAD_HEAD;
        coding = Coding(data[0]);
        book = has_book;
        if (book && n && !book_lengths) return GZ_NO_BOOK;
        if (size < blocks_offset(n, book)) return GZ_TRUNCATED_HEAD;
        const bool keeps = n > kBlock;
        if (keeps) tables.resize(segments_of(n));
        for (uint64_t i = 0; i < segments_of(n); i++) {
            Code code;
            read_code(i, book_lengths, &code);
            if (keeps ? !build_table(code, &tables[i], kBoth) : code.escape() < 0) return GZ_BAD_TABLE;
        }
        const uint8_t* index = data + index_offset(n, book);
        uint64_t at = blocks_offset(n, book), count = blocks_of(n);
        for (const uint8_t* pad = index + 2 * count; pad < data + at; pad++)
            if (*pad) return GZ_BAD_INDEX;
        if (keeps) offset.resize(count + 1);
        for (uint64_t i = 0; i < count; i++) {
            if (keeps) offset[i] = at;
            at += 4 * uint64_t(load16(index + 2 * i) & 0x3fff);
            if (at > size) return GZ_TRUNCATED_BLOCK;
        }
        if (keeps) offset[count] = at;
        return at == size ? 0 : GZ_TRAILING;
    }
    int kind(uint64_t number) const { return int(load16(data + index_offset(n, book) + 2 * number) >> 14); }

    // Blocks near the end of the body are moved to `room`, where vector loads may run over their end.
    int block(uint64_t number, BlockData* b, uint8_t* room) const {
        return block(number, offset[number], offset[number + 1], &tables[number / kSegmentBlocks], b, room);
    }
    // That of a body of one block; `table` is filled for it.
    int only_block(const uint8_t* book_lengths, CodeTable* table, BlockData* b, uint8_t* room) const {
        if (kind(0) == kDense) {
            Code code;
            read_code(0, book_lengths, &code);
            build_table(code, table, kDecodes);
        }
        return block(0, blocks_offset(n, book), size, table, b, room);
    }

   private:
    int block(uint64_t number, uint64_t start, uint64_t end, const CodeTable* table, BlockData* b, uint8_t* room) const {
        const int kind = this->kind(number);
        if (kind > kSparse) return GZ_BAD_KIND;
        uint64_t bytes = end - start;
        int count = int(std::min<uint64_t>(kBlock, n - number * kBlock));
        *b = {data + start, int(bytes), Kind(kind), count, table, {}};
        if (end + 64 > size) {
            if (bytes > kMaxDense - 64) return GZ_BAD_DENSE;
            std::memcpy(room, b->data, bytes);
            std::memset(room + bytes, 0, 64);
            b->data = room;
        }
        return 0;
    }
};

// What coding loses of the values: where it goes, and what it is divided by.
struct Lost {
    uint8_t* to;  // float32 at any address; NULL: nowhere
    float scale;
};

// gz_encode, which also notes what is lost.
int64_t encode_body(const gz_job& job, const void* x, uint64_t n, const gz_floor* floor, const uint8_t* lengths, uint8_t* out,
                    uint64_t capacity, int threads, Lost lost);

// Blocks [first, last) of a body into out, which is where its first value goes. Returns 0 or a gz_error.
int decode_blocks(const Body& body, const uint8_t* book_lengths, uint64_t first, uint64_t last, int dtype, const gz_floor* floor,
                  int shift, bool add, bool stream, uint8_t* out, const Kernels* kernels);

constexpr uint64_t kStreamBytes = 4 << 20;  // larger outputs do not fit the cache anyway

}  // namespace gz
#endif
