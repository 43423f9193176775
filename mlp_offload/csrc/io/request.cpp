#include "io/request.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "io/crc32c.h"

namespace mlp_offload::io {

const char* name_of(Operation operation) { return operation == Operation::read ? "read" : "write"; }

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::chrono::steady_clock::time_point deadline_after(double seconds) {
  const double bounded = std::min(std::max(seconds, 0.0), 3.2e8);
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(bounded));
}

Request::Request(Operation operation, uint64_t offset, char* address, uint64_t nbytes, bool checksum,
                 uint64_t block_bytes)
    : operation(operation),
      offset(offset),
      address(address),
      nbytes(nbytes),
      checksum(checksum),
      block_bytes(block_bytes),
      block_count(nbytes / block_bytes + (nbytes % block_bytes != 0)),
      submitted_seconds(now_seconds()),
      owner(getpid()) {
  if (checksum) block_crcs_.resize(block_count);
}

bool Request::wait(double timeout_seconds) const {
  if (done()) return true;
  // Before the lock: a worker of the parent may have held it at the moment of the fork.
  if (getpid() != owner) throw std::logic_error("an I/O request of the parent process cannot be waited for in a child");
  std::unique_lock<std::mutex> lock(mutex_);
  if (timeout_seconds < 0) {
    completed_.wait(lock, [this] { return done(); });
    return true;
  }
  return completed_.wait_until(lock, deadline_after(timeout_seconds), [this] { return done(); });
}

std::optional<uint32_t> Request::crc32c() const { return done() ? crc_ : std::nullopt; }

void Request::complete() {
  if (checksum && error_ == 0 && !early_eof_) {
    uint32_t crc = 0;
    for (uint64_t i = 0; i < block_count; ++i)
      crc = crc32c_combine(crc, block_crcs_[i], std::min(block_bytes, nbytes - i * block_bytes));
    crc_ = crc;
  }
  finished_ = now_seconds();
  if (started_seconds() == 0.0) started_.store(finished_, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    done_.store(true, std::memory_order_release);
  }
  completed_.notify_all();
}

}  // namespace mlp_offload::io
