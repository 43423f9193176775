// What one call of an Adam kernel is about, on any device, and what is refused before anything is written.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include "adam/update.h"

namespace mlp_offload::adam {

// A row of the segments array: consecutive elements of the subgroup with one gradient, one weight and one group.
// Addresses are of the segment's first element; grad_address 0: no gradient, the segment is left as it is;
// weight_address 0: no weight is written.
struct Segment {
  std::int64_t offset_numel, numel, grad_address, weight_address, grad_dtype, weight_dtype, group;
};
constexpr int kSegmentColumnCount = 7;
static_assert(sizeof(Segment) == kSegmentColumnCount * sizeof(std::int64_t), "a row is read as one Segment");

inline std::int64_t dtype_bytes(std::int64_t dtype) { return dtype == kFp32 ? 4 : 2; }

inline void check(bool ok, std::int64_t row, const Segment& segment, const char* reason) {
  if (ok) return;
  std::ostringstream message;
  message << "Adam segment " << row << " (offset " << segment.offset_numel << ", " << segment.numel
          << " elements, grad dtype " << segment.grad_dtype << ", weight dtype " << segment.weight_dtype << ", group "
          << segment.group << "): " << reason;
  throw std::invalid_argument(message.str());
}

inline void check(const Segment& s, std::int64_t row, std::int64_t stride_numel, bool remainder,
                  std::int64_t group_count) {
  check(s.offset_numel >= 0 && s.numel >= 0 && s.offset_numel <= stride_numel &&
            s.numel <= stride_numel - s.offset_numel,
        row, s, "lies outside the subgroup record");
  check(s.grad_dtype >= 0 && s.grad_dtype < kDtypeCount && s.weight_dtype >= 0 && s.weight_dtype < kDtypeCount, row, s,
        "unknown dtype code");
  check(s.group >= 0 && s.group < group_count, row, s, "no such group");
  check(s.grad_address % dtype_bytes(s.grad_dtype) == 0 && s.weight_address % dtype_bytes(s.weight_dtype) == 0, row, s,
        "an address is not aligned to its element");
  check(!remainder || s.grad_address == 0 || (s.weight_address != 0 && s.weight_dtype == kBf16), row, s,
        "a record of remainders needs the bf16 weight");
}

// Throws std::invalid_argument for a record that is none and for a row that points outside of it, a misaligned address,
// an unknown dtype or group.
inline void check_update(std::uint64_t state_address, std::int64_t stride_numel, std::int64_t main_itemsize,
                         const Segment* segments, std::int64_t segment_count, std::int64_t group_count) {
  const bool remainder = main_itemsize == sizeof(Remainder);
  if (state_address == 0 || state_address % alignof(float) != 0 || stride_numel < 0 ||
      (!remainder && main_itemsize != sizeof(float)) || stride_numel * main_itemsize % alignof(float) != 0) {
    throw std::invalid_argument("Adam state address " + std::to_string(state_address) + " with stride " +
                                std::to_string(stride_numel) + " elements and main_param of " +
                                std::to_string(main_itemsize) + " bytes is not a record");
  }
  for (std::int64_t row = 0; row < segment_count; ++row) {
    check(segments[row], row, stride_numel, remainder, group_count);
  }
}

}  // namespace mlp_offload::adam
