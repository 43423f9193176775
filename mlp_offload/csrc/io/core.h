// Everything about an I/O engine except how one block moves: cutting requests into blocks, choosing the next block,
// continuing short transfers, retrying, checksums, completion and shutdown. An engine is one subclass with run().
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "io/request.h"

namespace mlp_offload::io {

struct Settings {
  std::string path;
  bool direct = false;
  unsigned threads = 1;      // workers of the threads engine
  unsigned iodepth = 1;      // blocks in flight of the io_uring engine
  uint64_t block_bytes = 0;  // at most 1 GiB, below the limit of one system call
  uint64_t alignment = 1;    // of offset, address and length when direct
};

struct InFlight {
  Operation operation;
  uint64_t offset;
  uint64_t nbytes;
  double age_seconds;  // since submission
};

// A file descriptor that closes itself.
class Fd {
 public:
  explicit Fd(int number = -1) : number_(number) {}
  Fd(Fd&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Fd() { close(); }
  int get() const { return number_; }
  void close();

 private:
  int number_;
};

// Opens settings.path for both directions. Throws std::system_error; a symbolic link at the end is ELOOP.
Fd open_file(const Settings& settings);

// [Note: who keeps the core alive] The engine and each of its threads hold the core. When a system call never returns,
// close() gives up on its thread, and the core (with the file, the ring and the requests) lives on with that thread,
// so memory that a device may still write to is never taken away underneath it.
class Core {
 public:
  Core(const Settings& settings, Fd file) : settings(settings), file_(std::move(file)) {}
  virtual ~Core() = default;

  const Settings settings;

  virtual unsigned thread_count() const { return 1; }
  virtual void run() = 0;  // body of each thread; returns after drain()
  virtual bool register_buffers(char* address, uint64_t nbytes);

  // Queues the request. Throws std::logic_error after drain().
  virtual void enqueue(const RequestPtr& request);
  std::vector<InFlight> in_flight() const;

  // Takes no more requests, drops those not started (ECANCELED), gives the started ones the time, then drops their
  // unstarted blocks too and tells the threads to end. False: a block is still in flight, so a thread may be stuck.
  bool drain(double timeout_seconds);
  virtual void release() { file_.close(); }  // after the threads have ended

 protected:
  enum class Next { finished, again };

  virtual void wake() { work_.notify_all(); }  // something was queued, or the threads are to end

  bool wait_for_block(Block& block);  // false: the thread is to end
  bool try_block(Block& block);       // false: nothing is queued
  bool stopping() const;

  void before_transfer(Block& block);                // computes the checksum of a write
  Next after_call(Block& block, int64_t result);     // result: bytes moved, or -errno
  void finish(Block& block);                         // computes the checksum of a read, completes the request
  void break_down(int error);                        // fails all that is queued, now and later, with `error`

  int file() const { return file_.get(); }

 private:
  bool next_block(Block& block);
  void drop_rest(const RequestPtr& request, int error);
  bool retire_if_finished(const RequestPtr& request);
  std::vector<RequestPtr> drop_all(int error, bool also_started);

  Fd file_;
  mutable std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::array<std::deque<RequestPtr>, 2> waiting_;      // by direction: requests with blocks to start, oldest first
  std::array<uint64_t, 2> blocks_in_flight_{};         // by direction
  std::map<uint64_t, RequestPtr> live_;                // all not completed, by age
  uint64_t last_sequence_ = 0;
  int last_direction_ = 1;
  bool accepting_ = true, stopping_ = false;
  int broken_ = 0;
};

}  // namespace mlp_offload::io
