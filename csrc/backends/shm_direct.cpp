#include "backends/shm_direct.h"

#include <algorithm>
#include <string>

#include "base/spelling.h"
#include "schedule/routes.h"

namespace farandole {
namespace {

/// Bytes of the longest input, which all ranks know: a rank's own may be shorter.
size_t longest_bytes(const Operation& o, int size) {
  return longest_input(o.kind, shape_of(o, 0, size)) * size_of(o.input.dtype);
}

}  // namespace

bool ShmDirect::can_run(const Operation& o) const {
  if (o.algorithm.empty()) return true;
  const PathRow* forced = path_named(o.algorithm);
  return forced != nullptr && fits(*forced, o.kind, longest_bytes(o, memory_.size())) &&
         (memory_.foreign || !forced->by_address);
}

DirectPath& ShmDirect::path(const PathRow& row) {
  auto& made =
      paths_[static_cast<size_t>(std::ranges::find(path_table(), &row) - path_table().begin())];
  if (!made) made = row.make(memory_);
  row_ = &row;
  return *made;
}

PathQuestion ShmDirect::question(const Operation& o, bool shared) const {
  return {o.kind, longest_bytes(o, memory_.size()), memory_.size(),
          shared, memory_.prefers_foreign,          memory_.demands_foreign};
}

void ShmDirect::start(const Operation& o, uint32_t) {
  operation_ = &o;
  path_ = nullptr;
  row_ = nullptr;
  agreed_ = false;
  if (o.kind == Collective::barrier) return;
  forced_ = o.algorithm.empty() ? nullptr : path_named(o.algorithm);
  path_ = &path(forced_ != nullptr ? *forced_ : *choose_path(question(o, false), tuning_));
  // If no peer looks at addresses, no rank need wait for a line that peers have just read.
  if (row_->agrees_by != AgreesBy::in_data) show_addresses(o, memory_);
  path_->start(o);
}

void ShmDirect::refuse(const Operation& o) const {
  const PathRow* forced = path_named(o.algorithm);
  if (forced == nullptr) return;
  if (forced->by_address && !memory_.foreign)
    throw Error(ErrorCode::invalid_argument,
                "algorithm '" + o.algorithm +
                    "' needs to reach other ranks' memory, which it may not: " + why_not_foreign_,
                {},
                "let the kernel permit process_vm_readv and process_vm_writev between ranks, "
                "or use another algorithm");
  throw Error(ErrorCode::invalid_argument, "path '" + o.algorithm + "' cannot run " +
                                               std::string(name_of(o.kind)) + " of " +
                                               std::to_string(o.input.bytes()) + " bytes");
}

std::string ShmDirect::ways_for(const Operation& o) const {
  const size_t longest = longest_bytes(o, memory_.size());
  std::vector<std::string_view> names;
  for (const PathRow* row : path_table())
    if (fits(*row, o.kind, longest) && (memory_.foreign || !row->by_address))
      names.push_back(row->name);
  return "over shared memory: " + join_names(names);
}

bool ShmDirect::agrees_in_data() const {
  return row_ != nullptr && row_->agrees_by != AgreesBy::posts;
}

void ShmDirect::agreed() {
  agreed_ = true;
  choose_by_places();
}

/// Chooses by where the buffers lie, which is known when all ranks have posted.
void ShmDirect::choose_by_places() {
  if (row_ == nullptr) return;
  const PathRow* wanted =
      forced_ != nullptr ? forced_ : choose_path(question(*operation_, true), tuning_);
  if (!wanted->mapped) return;
  DirectOperation what;
  what.start(*operation_, memory_);
  const bool open = what.all_is_mapped();
  if (forced_ != nullptr && !open)
    throw Error(ErrorCode::invalid_argument,
                "algorithm '" + std::string(wanted->name) +
                    "' needs input and output in memory that all ranks map",
                {}, "use arrays from farandole.allocate(), or another algorithm");
  if (forced_ != nullptr || !open) return;
  path_ = &path(*wanted);
  path_->start(*operation_);
}

Progress ShmDirect::poll(TimePoint until) {
  if (path_ == nullptr) return Progress::finished;
  if (!agreed_ && row_->agrees_by == AgreesBy::meanwhile) {
    if (compare_posts(memory_) != Posts::same)
      return path_->show() ? Progress::moved : Progress::idle;
    agreed();
  }
  return path_->poll(until);
}

std::vector<int> ShmDirect::lacking() const {
  if (path_ == nullptr) return {};
  return agreed_ || row_->agrees_by == AgreesBy::in_data ? path_->lacking() : std::vector<int>();
}

std::string_view ShmDirect::way() const { return row_ == nullptr ? "barrier" : row_->name; }

}  // namespace farandole
