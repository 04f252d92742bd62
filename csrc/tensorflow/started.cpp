#include "tensorflow/started.h"

#include <utility>

namespace farandole::tf {

Started& Started::all() {
  static auto* const started = new Started;  // threads of TensorFlow may outlive everything
  return *started;
}

int64_t Started::start(const PluginTable& table, std::unique_ptr<Call> call, int64_t step) {
  Call& begun = *call;
  int64_t number = 0;
  bool waits = false;
  {
    const std::lock_guard lock(mutex_);
    number = ++last_;
    int64_t& newest = newest_[call->key()];
    const auto older = entries_.find(newest);
    const bool same_step = older != entries_.end() && older->second.step == step;
    const bool left = older != entries_.end() && !same_step;
    const bool flies = older != entries_.end() && !older->second.ended;
    waits = left && flies;
    Entry& entry = entries_[number];
    entry.step = step;
    if (left) entry.before = newest;
    if (waits) {
      call->keep_kernel();  // which may be gone before it is its turn
      older->second.after = number;
    }
    if (!(same_step && flies)) newest = number;  // else the engine refuses it: twice in one step
    entry.call = std::move(call);
  }
  if (!waits) begin(table, begun, number);
  return number;
}

std::unique_ptr<Call> Started::finish(int64_t number) {
  std::unique_lock lock(mutex_);
  const auto entry = entries_.find(number);
  if (entry == entries_.end()) return nullptr;
  entry->second.asked_for = true;
  changed_.wait(lock, [&] { return entry->second.ended; });
  std::unique_ptr<Call> call = std::move(entry->second.call);
  if (const auto newest = newest_.find(call->key());
      newest != newest_.end() && newest->second == number)
    newest_.erase(newest);
  forget_left(entry->second.before);
  entries_.erase(entry);
  return call;
}

void Started::begin(const PluginTable& table, Call& call, int64_t number) {
  call.start(table, false, [this, &table, number](Call&) { note_end(table, number); });
}

void Started::note_end(const PluginTable& table, int64_t number) {
  Call* next = nullptr;
  int64_t after = 0;
  {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[number];
    entry.ended = true;
    after = entry.after;
    if (after != 0) next = entries_[after].call.get();
    changed_.notify_all();
  }
  if (next != nullptr) begin(table, *next, after);  // it lives until it has ended
}

/// It has ended, and so have those before it: what nobody has asked for, nobody will.
void Started::forget_left(int64_t number) {
  while (number != 0) {
    const auto entry = entries_.find(number);
    if (entry == entries_.end()) return;
    number = entry->second.before;
    if (!entry->second.asked_for) entries_.erase(entry);
  }
}

}  // namespace farandole::tf
