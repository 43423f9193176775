// A persistent team of threads that sleep between jobs.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace mlp_offload::adam {

class Team {
 public:
  // Starts `worker_count` threads; throws std::system_error when the system refuses one (those started are joined).
  explicit Team(int worker_count);
  ~Team();  // joins
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Runs `job` in every worker and in the caller; returns when all are done. `job` must not throw. One caller at a
  // time.
  void run(const std::function<void()>& job);

 private:
  void work();
  void join();

  std::mutex mutex_;
  std::condition_variable start_, done_;
  const std::function<void()>* job_ = nullptr;
  std::uint64_t generation_ = 0;  // counts jobs, so that a worker takes each one once
  int running_ = 0;
  bool closing_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace mlp_offload::adam
