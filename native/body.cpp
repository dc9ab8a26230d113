// The GComp body: head, tables, index and blocks; threads; and the choice of instruction set.
#include "body.h"

#include <atomic>
#include <string>

namespace gz {
namespace {

// --- Instruction sets ---

std::vector<const Kernels*> available() {
    std::vector<const Kernels*> list{scalar_kernels()};
#if defined(GRADZIP_NO_SIMD)
#elif defined(__aarch64__)
    list.push_back(neon_kernels());
#else
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) list.push_back(avx2_kernels());
    if (__builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vbmi") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        list.push_back(avx512_kernels());
#endif
    return list;
}

const std::vector<const Kernels*>& offered() {
    static const std::vector<const Kernels*> list = available();
    return list;
}

std::atomic<const Kernels*>& chosen() {
    static std::atomic<const Kernels*> kernels{offered().back()};
    return kernels;
}

// Encodes blocks [first, last) and returns the bytes written at `out`, which has `room` bytes.
// Blocks are coded in place where there is room for the worst case, else through a buffer.
uint64_t encode_blocks(const Source& source, uint64_t first, uint64_t last, const uint8_t* lengths, uint8_t* tables,
                       uint8_t* index, uint8_t* out, uint64_t room, Lost lost) {
    Scratch& s = scratch()[0];
    alignas(64) CodeTable table;
    Sample samples[kSegmentBlocks];
    Code code;
    uint64_t at = 0;
    for (uint64_t number = first; number < last; number++) {
        if (number % kSegmentBlocks == 0 || number == first) {
            uint64_t segment = number / kSegmentBlocks;
            uint8_t sampled[256];
            const uint8_t* use = lengths ? lengths + 256 * segment : sampled;
            if (!lengths) {
                uint32_t counts[256];
                source.sample_segment(segment, counts, samples);
                code_lengths(counts, source.job.limit, sampled);
            }
            code.read(use);
            build_table(code, &table, kEncodes);
            if (tables) code.write_packed(tables + segment * kTableBytes);
        }
        BlockIn in = source.block(number, &table);
        source.streams(number + 1, 1, in.ahead.next);
        if (!lengths) {
            const uint64_t in_segment = number % kSegmentBlocks, left = kSegmentBlocks - in_segment;
            in.sample = &samples[in_segment];
            if (left * kSampleAhead <= kSegmentBlocks)
                source.streams(number + left + kSegmentBlocks - left * kSampleAhead, kSampleAhead, in.ahead.sample);
        }
        bool in_place = room - at >= kMaxDense;
        uint8_t* target = in_place ? out + at : s.frame;
        BlockOut result = source.kernels->encode_block(in, target, s);
        if (!in_place) std::memcpy(out + at, target, size_t(result.bytes));
        store16(index + 2 * number, unsigned(result.bytes / 4) | unsigned(result.kind) << 14);
        at += uint64_t(result.bytes);
        if (lost.to) source.kernels->lost(in, lost.scale, lost.to + number * kBlock * 4, s);
    }
    return at;
}

void write_head(const gz_job& job, uint8_t* out) {
    out[0] = uint8_t(coding_of(job));
    out[1] = job.book != 0;
    out[2] = out[3] = 0;
    store32(out + 4, job.book);
}

}  // namespace

const Kernels* kernels() { return chosen().load(); }

int64_t encode_body(const gz_job& job, const void* x, uint64_t n, const gz_floor* floor, const uint8_t* lengths, uint8_t* out,
                    uint64_t capacity, int threads, Lost lost) {
    if (!valid(job, n, floor) || (job.book && n && !lengths)) return GZ_BAD_ARGUMENT;
    if (capacity < gz_bound(n, job.dtype)) return GZ_NO_ROOM;
    if (lengths)
        for (uint64_t i = 0; i < segments_of(n); i++) {
            Code code;
            code.read(lengths + 256 * i);
            if (code.escape() < 0) return GZ_BAD_TABLE;
        }
    write_head(job, out);
    uint8_t* tables = job.book ? nullptr : out + kBodyHead;
    uint8_t* index = out + index_offset(n, job.book);
    uint64_t start = blocks_offset(n, job.book), count = blocks_of(n);
    std::memset(index + 2 * count, 0, size_t(start - index_offset(n, job.book) - 2 * count));

    Source source{job, x, n, floor, kernels()};
    if (stay_together(n, threads))
        return int64_t(start + encode_blocks(source, 0, count, lengths, tables, index, out + start, capacity - start, lost));
    std::vector<uint64_t> bounds = parts(n, threads);
    const uint64_t raw_block = uint64_t(kBlock) * uint64_t(float_layout(job.dtype).item_bytes);
    std::vector<uint64_t> size(bounds.size() - 1);
    run_parts(size.size(), [&](size_t i) {
        uint64_t from = start + bounds[i] * raw_block;
        uint64_t room = (i + 1 < size.size() ? start + bounds[i + 1] * raw_block : capacity) - from;
        size[i] = encode_blocks(source, bounds[i], bounds[i + 1], lengths, tables, index, out + from, room, lost);
    });
    uint64_t at = start + size[0];
    for (size_t i = 1; i < size.size(); i++) {
        std::memmove(out + at, out + start + bounds[i] * raw_block, size[i]);
        at += size[i];
    }
    return int64_t(at);
}

int decode_blocks(const Body& body, const uint8_t* book_lengths, uint64_t first, uint64_t last, int dtype, const gz_floor* floor,
                  int shift, bool add, bool stream, uint8_t* out, const Kernels* kernels) {
    Scratch* s = scratch();
    if (body.n <= kBlock) {
        if (first >= last) return 0;
        CodeTable table;
        BlockData block;
        const Target target{out, add, false};
        if (int error = body.only_block(book_lengths, &table, &block, s[0].frame)) return error;
        block.floors = {floor, 0, shift};
        return kernels->decode_group(&block, 1, dtype, body.coding, &target, {}, s);
    }
    const uint64_t item = uint64_t(float_layout(dtype).item_bytes);
    for (uint64_t number = first; number < last; number += kGroup) {
        BlockData block[kGroup];
        Target target[kGroup];
        int count = int(std::min<uint64_t>(kGroup, last - number));
        for (int k = 0; k < count; k++) {
            uint64_t start = (number + uint64_t(k)) * kBlock;
            if (int error = body.block(number + uint64_t(k), &block[k], s[k].frame)) return error;
            target[k] = {out + start * item, add, stream};
            block[k].floors = {floor, start, shift};
        }
        uint64_t after = number + kGroup;
        Ahead ahead{};
        if (after + kGroup <= last) {
            ahead.next[0] = body.data + body.offset[after];
            if (body.coding == kNear && !floor->given) {
                ahead.next[1] = reinterpret_cast<const uint8_t*>(floor->theta + after * kBlock);
                if (floor->second) ahead.next[2] = reinterpret_cast<const uint8_t*>(floor->second + after * kBlock);
            }
        }
        if (int error = kernels->decode_group(block, count, dtype, body.coding, target, ahead, s)) return error;
    }
    if (stream) std::atomic_thread_fence(std::memory_order_seq_cst);  // stores that bypass the cache have no order of their own
    return 0;
}

}  // namespace gz

using namespace gz;

extern "C" {

uint64_t gz_bound(uint64_t n, int32_t dtype) {
    return blocks_offset(n, false) + (n * uint64_t(float_layout(dtype).item_bytes) + 3) / 4 * 4;
}

int64_t gz_encode(const gz_job* job, const void* x, uint64_t n, const gz_floor* floor, const uint8_t* lengths, uint8_t* out,
                  uint64_t capacity, int32_t threads) {
    return encode_body(*job, x, n, floor, lengths, out, capacity, threads, {});
}

int64_t gz_decode(const uint8_t* data, uint64_t size, int32_t dtype, uint64_t n, const gz_floor* floor, int32_t shift,
                  const uint8_t* book, int32_t add, void* out, int32_t threads) {
    if (dtype < 0 || dtype > GZ_FLOAT16 || shift < 0 || shift > 127) return GZ_BAD_ARGUMENT;
    Body body{data, size, n, kFixed, false, {}, {}};
    if (int error = body.read(book)) return error;
    if (dtype != GZ_FLOAT32 && body.coding != kFixed) return GZ_BAD_HEAD;
    if (body.coding == kNear && n && !(floor && (floor->given || floor->theta))) return GZ_BAD_ARGUMENT;
    bool stream = !add && n * uint64_t(float_layout(dtype).item_bytes) >= kStreamBytes;
    const Kernels* use = kernels();
    std::vector<uint64_t> bounds = parts(n, threads);
    std::vector<int> error(bounds.size() - 1);
    run_parts(error.size(), [&](size_t i) {
        error[i] = decode_blocks(body, book, bounds[i], bounds[i + 1], dtype, floor, shift, add != 0, stream,
                                 static_cast<uint8_t*>(out), use);
    });
    for (int e : error)
        if (e) return e;
    return 0;
}

int64_t gz_decode_add_encode(const uint8_t* data, uint64_t size, int32_t in_shift, const uint8_t* book, const gz_job* job,
                             const float* local, uint64_t n, const gz_floor* floor, const uint8_t* lengths, uint8_t* out,
                             uint64_t capacity) {
    if (!valid(*job, n, floor) || job->dtype != GZ_FLOAT32 || (job->book && n && !lengths)) return GZ_BAD_ARGUMENT;
    if (in_shift < 0 || in_shift > 127) return GZ_BAD_ARGUMENT;
    if (capacity < gz_bound(n, GZ_FLOAT32)) return GZ_NO_ROOM;
    Body body{data, size, n, kFixed, false, {}, {}};
    if (int error = body.read(book)) return error;
    if (body.coding == kNear && n && !(floor && (floor->given || floor->theta))) return GZ_BAD_ARGUMENT;
    if (!lengths && body.book && n) return GZ_BAD_ARGUMENT;
    std::vector<CodeTable> tables(segments_of(n)), incoming(n <= kBlock ? tables.size() : 0);
    for (uint64_t i = 0; i < tables.size(); i++) {
        Code code;
        if (lengths)
            code.read(lengths + 256 * i);
        else
            body.read_code(i, book, &code);
        if (!build_table(code, &tables[i], kEncodes)) return GZ_BAD_TABLE;
        if (!job->book) code.write_packed(out + kBodyHead + i * kTableBytes);
    }
    write_head(*job, out);
    uint8_t* index = out + index_offset(n, job->book);
    uint64_t at = blocks_offset(n, job->book), count = blocks_of(n);
    std::memset(index + 2 * count, 0, size_t(at - index_offset(n, job->book) - 2 * count));
    Scratch* s = scratch();
    const Kernels* use = kernels();
    for (uint64_t number = 0; number < count; number++) {
        uint64_t start = number * kBlock;
        int here = int(std::min<uint64_t>(kBlock, n - start));
        std::memcpy(s[0].sum, local + start, size_t(here) * 4);
        BlockData block;
        Target target{s[0].sum, true, false};
        const int wrong = n <= kBlock ? body.only_block(book, &incoming[0], &block, s[0].frame) : body.block(number, &block, s[0].frame);
        if (wrong) return wrong;
        block.floors = {floor, start, in_shift};
        if (int error = use->decode_group(&block, 1, GZ_FLOAT32, body.coding, &target, {}, s)) return error;
        BlockIn in{s[0].sum, here, *job, coding_of(*job), {floor, start, job->shift}, &tables[number / kSegmentBlocks], {}, nullptr, nullptr};
        bool in_place = capacity - at >= kMaxDense;
        uint8_t* to = in_place ? out + at : s[1].frame;
        BlockOut result = use->encode_block(in, to, s[0]);
        if (!in_place) std::memcpy(out + at, to, size_t(result.bytes));
        store16(index + 2 * number, unsigned(result.bytes / 4) | unsigned(result.kind) << 14);
        at += uint64_t(result.bytes);
    }
    return int64_t(at);
}

int64_t gz_histogram(const gz_job* job, const void* x, uint64_t n, const gz_floor* floor, int64_t* counts) {
    if (!valid(*job, n, floor)) return GZ_BAD_ARGUMENT;
    Source source{*job, x, n, floor, kernels()};
    Sample samples[kSegmentBlocks];
    for (uint64_t i = 0; i < segments_of(n); i++) {
        uint32_t of_segment[256];
        source.sample_segment(i, of_segment, samples);
        std::copy(of_segment, of_segment + 256, counts + 256 * i);
    }
    return 0;
}

void gz_floors(const gz_floor* floor, uint64_t n, int8_t* out) {
    const Kernels* use = kernels();
    for (uint64_t start = 0; start < n; start += kBlock)
        use->floors(*floor, start, int(std::min<uint64_t>(kBlock, n - start)), 0, out + start);
}

void gz_strided_sums(const gz_strided* rows, uint64_t count, int64_t* sums) {
    for (uint64_t row = 0; row < count; row++) {
        const gz_strided r = rows[row];
        uint64_t sum = 0;  // of numbers moved up by 2^31: those without a sign are cheaper to widen
        if (r.stride == 1)
            for (uint64_t i = 0; i < r.count; i++) sum += uint32_t(r.first[i]) ^ 0x80000000u;
        else
            for (uint64_t i = 0; i < r.count; i++) sum += uint32_t(r.first[i * r.stride]) ^ 0x80000000u;
        sums[row] = int64_t(sum - (r.count << 31));
    }
}

uint64_t gz_checksum(const uint8_t* data, uint64_t size, uint64_t first_word) {
    auto mix = [](uint32_t x) {
        x ^= x >> 16;
        x *= 0x7feb352du;
        x ^= x >> 15;
        x *= 0x846ca68bu;
        return x ^ x >> 16;
    };
    uint64_t total = 0, words = size / 4;
    for (uint64_t i = 0; i < words; i++) {
        uint32_t word;
        std::memcpy(&word, data + 4 * i, 4);
        total += mix(word + uint32_t(first_word + i) * 0x9e3779b9u);
    }
    if (size % 4) {
        uint32_t word = 0;
        std::memcpy(&word, data + 4 * words, size % 4);
        total += mix(word + uint32_t(first_word + words) * 0x9e3779b9u);
    }
    return total;
}

int32_t gz_version(void) { return GZ_VERSION; }

const char* gz_isa(void) { return chosen().load()->name; }

const char* gz_available_isas(void) {
    static const std::string names = [] {
        std::string list;
        for (const Kernels* k : offered()) list += (list.empty() ? "" : ",") + std::string(k->name);
        return list;
    }();
    return names.c_str();
}

int64_t gz_set_isa(const char* name) {
    for (const Kernels* k : offered())
        if (std::strcmp(k->name, name) == 0) {
            chosen().store(k);
            return 0;
        }
    return GZ_BAD_ARGUMENT;
}

}  // extern "C"
