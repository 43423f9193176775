// What the kernel says about direct I/O on a file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace mlp_offload::io {

struct DirectAlignment {
  uint32_t memory_bytes;  // of addresses; 0: this file takes no direct I/O
  uint32_t offset_bytes;  // of offsets and lengths; 0: this file takes no direct I/O
};

// statx(2) with STATX_DIOALIGN (Linux 6.1). nullopt when the kernel or the file system does not tell.
// Throws std::system_error when the file cannot be looked at.
std::optional<DirectAlignment> direct_alignment(const std::string& path);

}  // namespace mlp_offload::io
