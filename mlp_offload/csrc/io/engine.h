// The face of an I/O engine: opens the file, starts the threads, checks requests, ends everything in close().
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/core.h"

namespace mlp_offload::io {

class Engine {
 public:
  // kind: "threads", "io_uring" or "null". Throws std::invalid_argument (settings) or std::system_error (open, ring).
  Engine(const std::string& kind, const Settings& settings);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Never blocks on the device. Throws std::invalid_argument for what direct I/O cannot do, std::logic_error when
  // closed or in a forked child. No order is kept between requests: wait for a write before reading it back.
  RequestPtr submit(Operation operation, uint64_t offset, char* address, uint64_t nbytes, bool checksum);

  // The region must stay mapped until close(). False, and harmless, where the engine or the kernel does not do it.
  bool register_buffers(char* address, uint64_t nbytes);

  std::vector<InFlight> in_flight() const;

  // See Core::drain. False leaves the threads; a later call may still succeed. In a forked child: true, does nothing.
  bool close(double timeout_seconds);

  const std::string kind;

 private:
  bool in_child() const;

  const pid_t owner_;
  std::shared_ptr<Core> core_;
  std::mutex close_mutex_;
  std::vector<std::thread> threads_;
};

// Builders of the three cores. make_uring throws std::system_error when the ring cannot be had.
std::shared_ptr<Core> make_threads(const Settings& settings);
std::shared_ptr<Core> make_uring(const Settings& settings);
std::shared_ptr<Core> make_null(const Settings& settings);

bool uring_compiled();
// Sets up a small ring to see. The text says why not, and is empty when it works.
std::pair<bool, std::string> uring_available();

}  // namespace mlp_offload::io
