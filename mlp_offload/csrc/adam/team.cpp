#include "adam/team.h"

#include <pthread.h>
#include <signal.h>

#include <string>

namespace mlp_offload::adam {

Team::Team(int worker_count) {
  // Signals belong to the process's own threads: a worker inherits a mask that blocks them all.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int i = 1; i <= worker_count; ++i) {
      workers_.emplace_back(&Team::work, this);
#if defined(__linux__)
      pthread_setname_np(workers_.back().native_handle(), ("mlp-adam-" + std::to_string(i)).c_str());
#endif
    }
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    join();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Team::~Team() { join(); }

void Team::join() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void Team::run(const std::function<void()>& job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = &job;
    running_ = static_cast<int>(workers_.size());
    ++generation_;
  }
  start_.notify_all();
  job();
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
  job_ = nullptr;
}

void Team::work() {
  std::uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    start_.wait(lock, [&] { return closing_ || generation_ != seen; });
    if (closing_) return;
    seen = generation_;
    const std::function<void()>& job = *job_;
    lock.unlock();
    job();
    lock.lock();
    if (--running_ == 0) done_.notify_one();
  }
}

}  // namespace mlp_offload::adam
