#include "queue.h"

#include <algorithm>
#include <stdexcept>

#include "denormals.h"

namespace transduce {
namespace {

constexpr int kTokensAtOnce = 256;  // source tokens that are encoded together
constexpr auto kLongWait = std::chrono::hours(1);

}  // namespace

Queue::Queue(const Model& model, int n_workers) : model_(model) {
    for (int i = 0; i < n_workers; i++) {
        workers_.push_back(std::make_unique<Worker>(model));
        free_workers_.push_back(workers_.back().get());
    }
}

// ---- clients

void Queue::join(Client& client) {
    const Lock lock(mutex_);
    clients_.insert(&client);
}

void Queue::submit(Client& client, std::vector<std::shared_ptr<Request>> requests, double order, bool works) {
    const Lock lock(mutex_);
    if (closed_ || client.closed) throw std::runtime_error("the queue is closed");
    for (const std::shared_ptr<Request>& request : requests)
        if (client.open.count(request->ticket)) throw std::invalid_argument("first_ticket: a sentence with this ticket has not ended");
    for (std::shared_ptr<Request>& request : requests) {
        request->client = &client;
        request->number = n_arrived_++;
        request->order = order, request->submission = n_submitted_;
        n_waiting_tokens_ += int64_t(request->ids.size());
        client.open.emplace(request->ticket, request);
        waiting_.insert(std::move(request));
    }
    n_submitted_++;
    wake(std::min(requests.size() - (works && !requests.empty()), free_workers_.size()));
}

void Queue::cancel(Client& client, int64_t ticket) {
    Lock lock(mutex_);
    const auto found = client.open.find(ticket);
    if (found == client.open.end()) return;
    end(*std::shared_ptr<Request>(found->second), Outcome::cancelled);
    unlock(lock);
}

int Queue::fd(Client& client) {
    const Lock lock(mutex_);
    if (!client.bell) client.bell = std::make_shared<const Bell>();
    return client.bell->fd();
}

void Queue::close_client(Client& client) {
    client.closed = true;
    while (!client.open.empty()) end(*std::shared_ptr<Request>(client.open.begin()->second), Outcome::cancelled);
}

void Queue::close(Client& client) {
    Lock lock(mutex_);
    close_client(client);
    unlock(lock);
}

void Queue::leave(Client& client) {
    const Lock lock(mutex_);
    close_client(client);
    clients_.erase(&client);
}

void Queue::collect(Client& client) {
    const Lock lock(mutex_);
    client.collected.clear();
    if (client.bell) client.bell->silence();
    client.rung = false;
    client.events.swap(client.collected);
}

void Queue::close() {
    Lock lock(mutex_);
    closed_ = true;
    for (Client* client : clients_) close_client(*client);
    wake(idle_.size());
    unlock(lock);
}

void Queue::close_and_wait() {
    close();
    Lock lock(mutex_);
    while (n_working_) all_left_.wait(lock);
    free_workers_.clear(), workers_.clear();  // clients may outlive them
}

transduce_load Queue::load() {
    const Lock lock(mutex_);
    int64_t n_open = 0;
    for (const Client* client : clients_) n_open += int64_t(client->open.size());
    return {int64_t(waiting_.size()), n_waiting_tokens_, n_open, n_steps_, n_rows_};
}

// ---- sentences, under the lock

void Queue::report(Client& client, Event event) {
    client.events.push_back(std::move(event));
    if (client.bell && !client.rung) bells_.push_back(client.bell), client.rung = true;
    if (!client.open.empty()) return;
    for (Waiter* waiter : idle_)
        if (waiter->client == &client) waiter->wake.notify_one();
}

// Releases the lock, then wakes event loops, which take the lock at once.
void Queue::unlock(Lock& lock) {
    std::vector<std::shared_ptr<const Bell>> bells;
    bells.swap(bells_);
    lock.unlock();
    for (const auto& bell : bells) bell->ring();
}

void Queue::end(Request& request, Outcome outcome, std::vector<Finished> hypotheses) {
    Client& client = *request.client;
    const int64_t ticket = request.ticket;
    const auto open = client.open.find(ticket);
    const std::shared_ptr<Request> kept = open->second;
    request.ended = true;
    if (request.waiting) waiting_.erase(kept), n_waiting_tokens_ -= int64_t(request.ids.size());
    client.open.erase(open);
    report(client, {ticket, outcome, std::move(hypotheses)});
}

void Queue::deliver(Worker::Slot& slot) {
    Request& request = *slot.request;
    if (request.ended) return;
    if (!slot.certain.empty()) report(*request.client, {request.ticket, Outcome::tokens, {{0, 0, false, std::move(slot.certain), {}}}});
    slot.certain.clear();
    if (slot.done) end(request, Outcome::done, slot.search.results());
}

void Queue::admit(Worker& worker) {
    if (waiting_.empty() || !worker.wants_more(**waiting_.begin())) return;
    const size_t n_threads = std::max<size_t>(1, std::min<size_t>(n_working_, workers_.size()));
    size_t n_sentences = waiting_.size();
    for (const auto& each : workers_) n_sentences += each->n_sentences();
    const size_t share = (n_sentences + n_threads - 1) / n_threads;  // threads have equal numbers of sentences
    for (int tokens = 0; !waiting_.empty() && (worker.n_sentences() < share || worker.passes(**waiting_.begin()));) {
        const std::shared_ptr<Request> request = *waiting_.begin();
        const int n = int(request->ids.size());
        if (!worker.fits(*request) || (tokens && tokens + n > kTokensAtOnce)) break;
        worker.add(request);
        waiting_.erase(waiting_.begin());
        request->waiting = false;
        tokens += n, n_waiting_tokens_ -= n;
    }
}

// ---- threads

bool Queue::stays(const Client* client, Time until) const {
    return !closed_ && !(client && client->open.empty()) && Clock::now() < until;
}

// Wakes up to n sleeping threads, which look for work.
void Queue::wake(size_t n) {
    for (; n && !idle_.empty(); n--) {
        idle_.back()->woken = true;
        idle_.back()->wake.notify_one();
        idle_.pop_back();
    }
}

void Queue::sleep(Lock& lock, const Client* client, Time until) {
    Waiter waiter;
    waiter.client = client;
    idle_.push_back(&waiter);
    waiter.wake.wait_until(lock, std::min(until, Clock::now() + kLongWait));
    if (!waiter.woken) idle_.erase(std::find(idle_.begin(), idle_.end(), &waiter));
}

// A free worker that has sentences or can take waiting ones; null: no worker is free, or there is no work.
Worker* Queue::take_worker() {
    for (size_t i = 0; i < free_workers_.size(); i++) {
        Worker* worker = free_workers_[i];
        if (worker->empty() && waiting_.empty()) continue;
        free_workers_.erase(free_workers_.begin() + i);
        return worker;
    }
    return nullptr;
}

void Queue::drive(Worker& worker, Lock& lock, const Client* client, Time until) {
    while (true) {
        worker.after_step([this](Worker::Slot& slot) { deliver(slot); });
        if (!stays(client, until)) break;
        admit(worker);
        if (worker.empty()) break;
        unlock(lock);
        bool failed = false;
        try {
            worker.step();
        } catch (...) {  // out of memory
            failed = true;
        }
        lock.lock();
        n_steps_++, n_rows_ += worker.n_rows();
        if (failed) {
            worker.give_up([this](Worker::Slot& slot) {
                if (!slot.request->ended) end(*slot.request, Outcome::failed);
            });
        }
    }
    free_workers_.push_back(&worker);
    unlock(lock);
    lock.lock();
}

int64_t Queue::work(const Client* client, Time until) {
    const FlushDenormals flush;
    Lock lock(mutex_);
    n_working_++;
    while (stays(client, until)) {
        if (Worker* worker = take_worker())
            drive(*worker, lock, client, until);
        else
            sleep(lock, client, until);
    }
    if (Worker* worker = take_worker()) {  // for another thread
        free_workers_.insert(free_workers_.begin(), worker);
        wake(1);
    }
    model_.kernels.release();
    if (!--n_working_) all_left_.notify_all();
    return client ? int64_t(client->open.size()) : 0;
}

}  // namespace transduce
