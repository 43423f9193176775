#include "io/alignment.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

namespace mlp_offload::io {

// The C library of older distributions has no names for these fields, so the kernel's layout is written out here.
std::optional<DirectAlignment> direct_alignment(const std::string& path) {
#ifdef SYS_statx
  constexpr unsigned kDioAlign = 0x2000;  // STATX_DIOALIGN
  constexpr size_t kMaskAt = 0, kMemoryAt = 152, kOffsetAt = 156;
  alignas(8) unsigned char buffer[256] = {};
  if (syscall(SYS_statx, AT_FDCWD, path.c_str(), 0, kDioAlign, buffer) != 0) {
    if (errno == ENOSYS || errno == EINVAL || errno == EPERM) return std::nullopt;
    throw std::system_error(errno, std::generic_category(), path);
  }
  uint32_t mask;
  DirectAlignment found;
  std::memcpy(&mask, buffer + kMaskAt, sizeof mask);
  std::memcpy(&found.memory_bytes, buffer + kMemoryAt, sizeof found.memory_bytes);
  std::memcpy(&found.offset_bytes, buffer + kOffsetAt, sizeof found.offset_bytes);
  if (mask & kDioAlign) return found;
#else
  (void)path;
#endif
  return std::nullopt;
}

}  // namespace mlp_offload::io
