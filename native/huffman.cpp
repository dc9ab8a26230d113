// Code lengths by package-merge and canonical tables (docs/format.md, "Code tables" and "Choosing code lengths").
#include <algorithm>
#include <utility>

#include "layout.h"

namespace gz {

namespace {
constexpr int64_t kMinShare = 1024;  // a symbol rarer than 1/1024 is left to the escape
constexpr int kMaxItems = 257;
constexpr int kMaxLimit = 8;

struct Item {
    int64_t weight;
    int symbol;
};

// lengths[i] of sorted items, at most limit. Only weights matter: in every level the chosen leaves are a prefix.
void package_merge(const Item* items, int count, int limit, int* lengths) {
    std::fill(lengths, lengths + count, 0);
    if (count < 2) return;
    static thread_local int64_t level[kMaxLimit][2 * kMaxItems];
    static thread_local bool is_leaf[kMaxLimit][2 * kMaxItems];
    int size[kMaxLimit];
    for (int l = 0; l < limit; l++) {
        int packages = l ? size[l - 1] / 2 : 0, leaf = 0, package = 0, at = 0;
        while (leaf < count || package < packages) {
            int64_t bundle = package < packages ? level[l - 1][2 * package] + level[l - 1][2 * package + 1] : 0;
            bool take_leaf = leaf < count && (package >= packages || items[leaf].weight <= bundle);
            level[l][at] = take_leaf ? items[leaf++].weight : bundle;
            package += !take_leaf;
            is_leaf[l][at++] = take_leaf;
        }
        size[l] = at;
    }
    int chosen = 2 * count - 2;
    for (int l = limit - 1; l >= 0; l--) {
        int leaves = 0;
        for (int i = 0; i < chosen; i++) leaves += is_leaf[l][i];
        for (int i = 0; i < leaves; i++) lengths[i]++;
        chosen = 2 * (chosen - leaves);
    }
}

// The same for few items: which items of a level are leaves is a mask, and infinite weights end both queues, so that
// nothing is asked where they end. Weights are the upper bits of `items`, symbols the lower 9.
constexpr int kFewItems = 32;
void package_merge_few(const uint64_t* items, int count, int limit, int* lengths) {
    constexpr uint64_t kEnd = ~uint64_t(0) >> 1;
    uint64_t weight[kFewItems + 1], level[2][2 * kFewItems + 2], leaves_at[kMaxLimit];
    for (int i = 0; i < count; i++) weight[i] = items[i] >> 9;
    weight[count] = kEnd;
    const int wanted = 2 * count - 2;  // no more of any level is ever taken
    int packages = 0;
    for (int l = 0; l < limit; l++) {
        const uint64_t* before = level[(l + 1) & 1];
        uint64_t* now = level[l & 1];
        uint64_t leaf_mask = 0;
        const int size = std::min(count + packages, wanted);
        int leaf = 0, package = 0;
        for (int at = 0; at < size; at++) {
            const uint64_t bundle = package < packages ? before[2 * package] + before[2 * package + 1] : kEnd;
            const bool take_leaf = weight[leaf] <= bundle;
            now[at] = take_leaf ? weight[leaf] : bundle;
            leaf += take_leaf;
            package += !take_leaf;
            leaf_mask |= uint64_t(take_leaf) << at;
        }
        leaves_at[l] = leaf_mask;
        packages = size / 2;
    }
    std::fill(lengths, lengths + count, 0);
    int chosen = wanted;
    for (int l = limit - 1; l >= 0; l--) {
        const int leaves = chosen ? __builtin_popcountll(leaves_at[l] & ~uint64_t(0) >> (64 - chosen)) : 0;
        for (int i = 0; i < leaves; i++) lengths[i]++;
        chosen = 2 * (chosen - leaves);
    }
}

// True if there are few symbols, whose lengths it has found.
template <typename Count>
bool few_code_lengths(const Count* counts, int limit, uint8_t* lengths) {
    uint64_t items[kFewItems], total = 0;  // weight and symbol
    int count = 0;
    constexpr int kAtOnce = 8 / sizeof(Count);
    for (int first = 0; first < 256; first += kAtOnce) {
        uint64_t any;
        std::memcpy(&any, counts + first, 8);
        if (!any) continue;
        for (int s = first; s < first + kAtOnce; s++) {
            if (!counts[s]) continue;
            if (count == kFewItems - 1 || uint64_t(counts[s]) >> 40) return false;
            items[count++] = uint64_t(counts[s]) << 9 | uint64_t(s);
            total += uint64_t(counts[s]);
        }
    }
    int kept = 0;
    uint64_t escaped = total;
    for (int i = 0; i < count; i++) {
        const uint64_t weight = items[i] >> 9;
        if (weight * uint64_t(kMinShare) < total) continue;
        escaped -= weight;
        items[kept++] = items[i];
    }
    if (kept > (1 << limit) - 1) return false;
    items[kept++] = std::max<uint64_t>(1, escaped) << 9 | uint64_t(kEscape);
    for (int i = 1; i < kept; i++) {
        const uint64_t item = items[i];
        int at = i;
        for (; at && items[at - 1] > item; at--) items[at] = items[at - 1];
        items[at] = item;
    }
    int found[kFewItems];
    package_merge_few(items, kept, limit, found);
    std::memset(lengths, 0, 256);
    for (int i = 0; i < kept; i++)
        if (const int symbol = int(items[i] & 511); symbol != kEscape) lengths[symbol] = uint8_t(found[i]);
    return true;
}
}  // namespace

void code_lengths(const uint32_t* counts, int limit, uint8_t* lengths) {
    if (few_code_lengths(counts, limit, lengths)) return;  // fewer bytes to look through
    int64_t wide[256];
    std::copy(counts, counts + 256, wide);
    code_lengths(wide, limit, lengths);
}

void code_lengths(const int64_t* counts, int limit, uint8_t* lengths) {
    if (few_code_lengths(counts, limit, lengths)) return;
    int64_t total = 0;
    for (int s = 0; s < 256; s++) total += counts[s];
    Item items[kMaxItems];
    int count = 0;
    for (int s = 0; s < 256; s++)
        if (counts[s] > 0 && counts[s] * kMinShare >= total) items[count++] = {counts[s], s};
    std::sort(items, items + count, [](const Item& a, const Item& b) {
        return a.weight != b.weight ? a.weight > b.weight : a.symbol < b.symbol;
    });
    count = std::min(count, (1 << limit) - 1);
    int64_t escaped = total;
    for (int i = 0; i < count; i++) escaped -= items[i].weight;
    items[count++] = {std::max<int64_t>(1, escaped), kEscape};
    std::sort(items, items + count, [](const Item& a, const Item& b) {
        return a.weight != b.weight ? a.weight < b.weight : a.symbol < b.symbol;
    });
    int result[kMaxItems];
    package_merge(items, count, limit, result);
    std::memset(lengths, 0, 256);
    for (int i = 0; i < count; i++)
        if (items[i].symbol != kEscape) lengths[items[i].symbol] = uint8_t(result[i]);
}

void Code::read(const uint8_t* lengths) {
    count = 0;
    for (int first = 0; first < 256; first += 8) {
        uint64_t eight;
        std::memcpy(&eight, lengths + first, 8);
        while (eight) {
            const int byte = __builtin_ctzll(eight) / 8;
            add(first + byte, int(eight >> (8 * byte) & 255));
            eight &= ~(uint64_t(255) << (8 * byte));
        }
    }
}

void Code::read_packed(const uint8_t* table) {
    count = 0;
    for (int first = 0; first < 256; first += 16) {
        uint64_t sixteen;
        std::memcpy(&sixteen, table + first / 2, 8);
        while (sixteen) {
            const int nibble = __builtin_ctzll(sixteen) / 4;
            add(first + nibble, int(sixteen >> (4 * nibble) & 15));
            sixteen &= ~(uint64_t(15) << (4 * nibble));
        }
    }
}

void Code::write_packed(uint8_t* table) const {
    std::memset(table, 0, kTableBytes);
    for (int i = 0; i < count; i++) table[symbol[i] / 2] |= uint8_t(length[i] << (4 * (symbol[i] & 1)));
}

int Code::escape() const {
    int left = 256;
    for (int i = 0; i < count; i++) {
        if (length[i] > 8) return -1;
        left -= 256 >> length[i];
    }
    if (left <= 0 || (left & (left - 1))) return -1;
    return 8 - __builtin_ctz(unsigned(left));
}

namespace {

// The low 2^Bits entries are done, and the next ones start as the same: their upper bits belong to no code so far.
template <int Bits>
void repeat(CodeTable* table) {
    std::memcpy(table->symbol + (1 << Bits), table->symbol, 1 << Bits);
    std::memcpy(table->consumed + (1 << Bits), table->consumed, 1 << Bits);
    std::memcpy(table->distance + (1 << Bits), table->distance, 1 << Bits);
}

uint8_t reversed(int value, int length) {
    static const struct Bytes {
        uint8_t reversed[256];
        Bytes() {
            for (int i = 0; i < 256; i++) {
                int result = 0;
                for (int bit = 0; bit < 8; bit++) result |= (i >> bit & 1) << (7 - bit);
                reversed[i] = uint8_t(result);
            }
        }
    } bytes;
    return uint8_t(bytes.reversed[value] >> (8 - length));
}

}  // namespace

bool build_table(const Code& code, CodeTable* table, Use use) {
    const int escape = code.escape();
    if (escape < 0) return false;
    int first[10] = {0};  // of each length's symbols, in the order of (length, symbol)
    for (int i = 0; i < code.count; i++) first[code.length[i] + 1]++;
    for (int l = 1; l < 10; l++) first[l] += first[l - 1];
    uint8_t order[256];
    int place[9];
    std::copy(first, first + 9, place);
    for (int i = 0; i < code.count; i++) order[place[code.length[i]]++] = uint8_t(i);

    table->lowest = table->highest = 0;
    for (int i = 0; i < code.count; i++) {
        const int distance = code.symbol[i] < 128 ? code.symbol[i] : code.symbol[i] - 255;
        table->lowest = std::min(table->lowest, distance);
        table->highest = std::max(table->highest, distance);
    }
    uint8_t bits[256], escape_bits = 0;  // of each symbol, by its number in the code
    int next = 0;
    for (int l = 1; l <= 8; l++) {
        next <<= 1;
        for (int i = first[l]; i < first[l + 1]; i++) bits[order[i]] = reversed(next++, l);
        if (l == escape) escape_bits = reversed(next++, l);  // after all symbols of its length
    }
    if (use & kEncodes) {
        const uint16_t escape_entry = uint16_t(escape_bits | (escape | kEscaped) << 8);
        std::memset(table->code, escape_bits, 256);
        std::memset(table->length, escape | kEscaped, 256);
        std::fill(table->entry, table->entry + 256, escape_entry);
        for (int i = 0; i < code.count; i++) {
            const int s = code.symbol[i];
            table->code[s] = bits[i];
            table->length[s] = code.length[i];
            table->entry[s] = uint16_t(bits[i] | code.length[i] << 8);
        }
    }
    if (!(use & kDecodes)) return true;
    auto put_escape = [&] {
        table->symbol[escape_bits] = table->distance[escape_bits] = 0;
        table->consumed[escape_bits] = uint8_t(escape | kEscaped);
    };
    auto put_codes_of = [&](int length) {
        for (int i = first[length]; i < first[length + 1]; i++) {
            const int s = code.symbol[order[i]], at = bits[order[i]];
            table->symbol[at] = uint8_t(s);
            table->consumed[at] = uint8_t(s ? length : length | kZero);
            table->distance[at] = uint8_t((s < 128 ? s : s - 255) + 128);
        }
        if (length == escape) put_escape();
    };
    // Codes of each length lie below 2^length. What is copied before it is written is of no meaning.
    table->symbol[0] = table->consumed[0] = table->distance[0] = 0;
    if (escape == 0) put_escape();
    repeat<0>(table), put_codes_of(1);
    repeat<1>(table), put_codes_of(2);
    repeat<2>(table), put_codes_of(3);
    repeat<3>(table), put_codes_of(4);
    repeat<4>(table), put_codes_of(5);
    repeat<5>(table), put_codes_of(6);
    repeat<6>(table), put_codes_of(7);
    repeat<7>(table), put_codes_of(8);
    return true;
}

bool build_table(const uint8_t* lengths, CodeTable* table, Use use) {
    Code code;
    code.read(lengths);
    return build_table(code, table, use);
}

}  // namespace gz

extern "C" int64_t gz_code_lengths(const int64_t* counts, uint64_t rows, int32_t limit, uint8_t* lengths) {
    if (limit < 1 || limit > gz::kMaxLimit) return GZ_BAD_ARGUMENT;
    for (uint64_t row = 0; row < rows; row++) gz::code_lengths(counts + 256 * row, limit, lengths + 256 * row);
    return 0;
}
