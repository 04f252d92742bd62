// Calls between the op that starts them and the op that finishes them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/plugin.h"
#include "tensorflow/call.h"

namespace farandole::tf {

/// All calls of the process that have been started, by number, until they are finished. If a step
/// fails between the two, its calls are never finished: one that is still in flight goes before the
/// next of its name, as it will on the other ranks.
class Started {
 public:
  static Started& all();

  /// Puts a call on its way, at the latest once an older step's of that name has ended. Its number.
  int64_t start(const PluginTable& table, std::unique_ptr<Call> call, int64_t step);
  /// Waits for its end: engines end what they were asked, if by an error. Null when there is no
  /// such call any more.
  std::unique_ptr<Call> finish(int64_t number);

 private:
  struct Entry {
    std::unique_ptr<Call> call;
    int64_t step = 0;
    int64_t before = 0, after = 0;  // of the same name; 0: none
    bool ended = false;
    bool asked_for = false;  // a thread finishes it
  };

  void begin(const PluginTable& table, Call& call, int64_t number);
  void note_end(const PluginTable& table, int64_t number);
  void forget_left(int64_t number);

  std::mutex mutex_;  // guards all
  std::condition_variable changed_;
  std::map<int64_t, Entry> entries_;
  std::map<std::string, int64_t> newest_;  // by key
  int64_t last_ = 0;
};

}  // namespace farandole::tf
