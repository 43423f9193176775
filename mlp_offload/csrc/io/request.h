// One read or write of a caller, and the block of it that a worker moves.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace mlp_offload::io {

enum class Operation { read = 0, write = 1 };

const char* name_of(Operation operation);

// CLOCK_MONOTONIC in seconds: the same clock as Python's time.monotonic().
double now_seconds();

// Shared by the caller and the engine; either may let go first. Results are valid once done() is true.
class Request {
 public:
  Request(Operation operation, uint64_t offset, char* address, uint64_t nbytes, bool checksum, uint64_t block_bytes);

  const Operation operation;
  const uint64_t offset;
  char* const address;
  const uint64_t nbytes;
  const bool checksum;
  const uint64_t block_bytes;
  const uint64_t block_count;
  const double submitted_seconds;
  const pid_t owner;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // True once done; a negative timeout waits for ever. Throws std::logic_error in a forked child, where nobody is
  // left to complete the request.
  bool wait(double timeout_seconds) const;

  int error_number() const { return done() ? error_ : 0; }
  bool early_eof() const { return done() && early_eof_; }
  bool failed() const { return error_number() != 0 || early_eof(); }
  std::optional<uint32_t> crc32c() const;
  double started_seconds() const { return started_.load(std::memory_order_relaxed); }  // 0: not yet
  double finished_seconds() const { return done() ? finished_ : 0.0; }

 private:
  friend class Core;  // which guards the next group by its own mutex

  uint64_t sequence_ = 0;
  uint64_t next_block_ = 0;       // blocks before it were started or dropped
  uint64_t blocks_in_flight_ = 0;
  int error_ = 0;                 // of the first block that failed
  bool early_eof_ = false;
  std::vector<uint32_t> block_crcs_;

  void start() { started_.store(now_seconds(), std::memory_order_relaxed); }
  void complete();

  std::atomic<double> started_{0.0};
  double finished_ = 0.0;
  std::optional<uint32_t> crc_;
  mutable std::mutex mutex_;
  mutable std::condition_variable completed_;
  std::atomic<bool> done_{false};
};

using RequestPtr = std::shared_ptr<Request>;

struct Block {
  RequestPtr request;
  uint64_t index = 0;
  uint64_t offset = 0;
  char* address = nullptr;
  uint64_t nbytes = 0;
  uint64_t transferred = 0;
  unsigned retries = 0;  // EAGAIN answers in a row
  int error = 0;
  bool early_eof = false;
  uint32_t crc = 0;

  // What is left to move.
  uint64_t left_offset() const { return offset + transferred; }
  char* left_address() const { return address + transferred; }
  uint64_t left_nbytes() const { return nbytes - transferred; }
};

// A duration as a point on the steady clock; anything past ten years is ten years.
std::chrono::steady_clock::time_point deadline_after(double seconds);

}  // namespace mlp_offload::io
